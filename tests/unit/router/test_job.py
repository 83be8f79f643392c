"""A job's states, and the tokens and block hashes that it takes along."""

from __future__ import annotations

from itertools import product

import pytest

from tandem.common.block_hash import HASH_VERSION, hash_blocks
from tandem.common.kv_budget import HEAVY_HITTERS, SINKS_WINDOW, KvBudget
from tandem.common.sampling_params import SamplingParams
from tandem.common.states import ForbiddenTransition
from tandem.net.rpc.tandem.v1.worker_pb2 import SequenceUpdate
from tandem.net.store.registry import KvCompatibility
from tandem.router.metrics.timeline import Timeline
from tandem.router.placement.hint import PlacementHint
from tandem.router.request.job import (
    TRANSITIONS,
    Job,
    JobState,
    PreparedRequest,
    Progress,
)
from tandem.router.request.request import ClientRequest

COMPATIBILITY = KvCompatibility("m", "float32", "invariant", 4, "float32", "l", HASH_VERSION)

DRAWN = SamplingParams(seed=0, max_tokens=16)


def job_of(state: JobState = JobState.PLACING) -> Job:
    client = ClientRequest("a prompt")
    request = PreparedRequest(client, DRAWN, [1, 2, 3, 4, 5])
    hashes = hash_blocks(COMPATIBILITY.chain_root(b""), request.token_ids, 4)
    return Job(request, Progress(hashes, Timeline()), state=state)


@pytest.mark.parametrize(("state", "to"), list(product(JobState, JobState)))
def test_only_the_tables_transitions_are_allowed(state: JobState, to: JobState) -> None:
    job = job_of(state)
    if to in TRANSITIONS[state]:
        job.to(to)
        assert job.state is to
        return
    with pytest.raises(ForbiddenTransition):
        job.to(to)
    assert job.state is state


def test_every_state_is_reached_and_only_ends_have_no_way_on() -> None:
    reached = {to for ways in TRANSITIONS.values() for to in ways}
    assert reached == set(JobState) == set(TRANSITIONS)
    ends = {state for state in JobState if job_of(state).is_over}
    assert ends == {JobState.ENDED, JobState.FAILED, JobState.CANCELLED}


def test_a_job_with_a_kv_budget_has_no_hashes() -> None:
    """Nobody has its KV, so nobody is asked for it; its worker is told of the budget."""
    client = ClientRequest("a prompt", kv_budget=KvBudget(8, 2))
    job = Job(PreparedRequest(client, DRAWN, [1] * 9), Progress([], Timeline()))
    job.progress.output_token_ids += [1] * 9
    assert job.hashes(COMPATIBILITY) == []


@pytest.mark.parametrize(
    ("budget", "attempts", "is_restarted"),
    [
        (KvBudget(256, policy=HEAVY_HITTERS), [0, 0, 1], True),
        (KvBudget(256, policy=HEAVY_HITTERS), [1, 1, 1], False),  # the first one gave no token
        (KvBudget(256, policy=SINKS_WINDOW), [0, 0, 1], False),
        (None, [0, 0, 1], False),
    ],
)
def test_heavy_hitters_are_restarted_where_tokens_of_another_submission_follow(
    budget: KvBudget | None, attempts: list[int], is_restarted: bool
) -> None:
    client = ClientRequest("a prompt", kv_budget=budget)
    job = Job(PreparedRequest(client, DRAWN, [1] * 9), Progress([], Timeline()))
    for attempt in attempts:
        cached_tokens = 5 - attempt
        job.progress.take_source(SequenceUpdate(attempt=attempt, cached_tokens=cached_tokens))
    assert job.is_budget_restarted == is_restarted
    assert job.progress.cached_tokens == 5 - attempts[0], "the first token's"


def test_a_hint_counts_for_the_first_submission_alone() -> None:
    """A worker that refused, or was lost, is not asked again; a fork goes to its parent."""
    hint = PlacementHint("r", 0.0, "decode-0", "prefill-1")
    request = PreparedRequest(ClientRequest("a prompt", hint=hint), DRAWN, [1] * 5)
    job = Job(request, Progress([], Timeline()))
    assert job.required_workers == ("decode-0", "prefill-1")
    fork = Job(request, Progress([], Timeline()), parent=job)
    assert fork.required_workers == ("", "")
    job.routing.num_submissions = 1
    assert job.required_workers == ("", "")
    assert job_of().required_workers == ("", "")


def test_hashes_grow_with_what_was_made() -> None:
    job = job_of()
    job.progress.output_token_ids += [6, 7, 8, 9]
    assert len(job.hashes(None)) == 1
    whole = hash_blocks(COMPATIBILITY.chain_root(b""), [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert job.hashes(COMPATIBILITY) == whole
