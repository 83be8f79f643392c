"""A request decodes where its prompt is prefilled, if decode workers have much more to do."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from tandem.common.perf_model.rates import (
    DEFAULT_DECODE,
    DecodeRate,
    PairRate,
    PrefillRate,
    WorkerRates,
)
from tandem.router.placement.choose import Placement, Roster, Work, choose
from tandem.router.placement.reasons import reason_of, sentence_of
from tests.unit.router.snapshots import snapshot

RATES = WorkerRates(
    PrefillRate(0.02, 1e-3, 0.0), DecodeRate(0.012, 1e-3), block_bytes=1000, measured=True
)
UNMEASURED = msgspec.structs.replace(RATES, decode=DEFAULT_DECODE)
WORK = Work(160, completion_tokens=100)
FULL = 100.0  # share of a worker that always computed prompts
PAIRS = {f"p{n}": PairRate("nixl", 1e-3, 1e9) for n in range(2)}


def worker(worker_id: str, **fields: Any) -> Any:
    role = "prefill" if worker_id.startswith("p") else "decode"
    decodes = role == "prefill"
    values = {"rates": RATES, "pairs": PAIRS, "decodes": decodes, "blocks_total": 1000, **fields}
    return snapshot(worker_id, role, **values)


def place(*workers: Any, work: Work = WORK, **choices: Any) -> Placement:
    roster = Roster(workers)
    roster.full_share = FULL
    placement = choose(work, roster, {}, Random(0), **choices)
    assert placement is not None
    return placement


BUSY, IDLE = worker("d0", num_running=8, chunk_tokens=64), worker("p0")


def test_a_request_stays_where_it_is_prefilled_if_decode_workers_are_busy() -> None:
    placement = place(BUSY, IDLE)
    assert placement.decode.worker_id == placement.prefill_worker.worker_id == "p0"
    # A prefill worker never waits for another worker's prefill.
    assert placement.prefill_candidates == ()
    assert placement.tokens_missing == 160
    said = sentence_of(reason_of(WORK, placement), placement)
    assert "because the decode workers were much busier" in said


@pytest.mark.parametrize(
    ("decode", "prefill", "work"),
    [
        pytest.param(worker("d0"), IDLE, WORK, id="an idle decode worker"),
        pytest.param(worker("d0", num_running=1), IDLE, WORK, id="hardly anything is saved"),
        pytest.param(BUSY, replace(IDLE, decodes=False), WORK, id="it does not decode"),
        pytest.param(BUSY, replace(IDLE, prefill_share=90.0), WORK, id="it is busy with prompts"),
        pytest.param(BUSY, worker("p0", num_running=12), WORK, id="it decodes as much"),
        pytest.param(BUSY, worker("p0", queued_s=3.0), WORK, id="prompts wait there"),
        pytest.param(BUSY, IDLE, replace(WORK, completion_tokens=8), id="a short answer"),
        pytest.param(BUSY, IDLE, replace(WORK, completion_tokens=0), id="an unknown answer"),
        pytest.param(replace(BUSY, rates=UNMEASURED), IDLE, WORK, id="no decode was measured"),
    ],
)
def test_a_request_moves_to_a_decode_worker(decode: Any, prefill: Any, work: Work) -> None:
    placement = place(decode, prefill, work=work)
    assert placement.decode.worker_id == "d0"
    assert [w.worker_id for w in placement.prefill_candidates] == ["p0"]


def test_a_turn_goes_where_the_kv_of_its_session_is() -> None:
    """However much sooner it would decode elsewhere: its history would be computed there again."""
    turn = Work(3200, completion_tokens=100, is_of_session=True)
    roster = Roster([BUSY, IDLE])
    placement = choose(turn, roster, {"d0": 199}, Random(0))
    assert placement is not None
    assert placement.decode.worker_id == "d0"
    # Here too, but the prefill worker has as much of the prompt.
    shared = choose(turn, roster, {"d0": 100, "p0": 100}, Random(0))
    assert shared is not None
    assert shared.decode.worker_id == "p0"


@pytest.mark.parametrize(
    "prefill",
    [
        pytest.param(worker("p0", num_running=4, num_running_slots=4), id="no slot is free"),
        pytest.param(worker("p0", num_running=4, num_running_slots=8), id="half are taken"),
    ],
)
def test_slots_are_left_for_the_prompts_of_other_requests(prefill: Any) -> None:
    full = replace(BUSY, load=msgspec.structs.replace(BUSY.load, num_running=30))
    assert place(full, prefill).decode.worker_id == "d0"


def test_a_pull_beside_the_computation_of_the_prompt_costs_nothing() -> None:
    slow = {"p0": PairRate("nixl", 1e-3, 2e5)}  # 4,000 tokens take 1.25 s
    work = Work(4000, completion_tokens=30)
    assert place(worker("d0", pairs=slow), IDLE, work=work).decode.worker_id == "d0"


def test_prompts_avoid_a_worker_that_decodes() -> None:
    busy = worker("p0", num_running=20, chunk_tokens=64)
    placement = place(worker("d0"), busy, worker("p1"), work=Work(1000))
    assert [w.worker_id for w in placement.prefill_candidates] == ["p1", "p0"]


def test_a_worker_that_never_decoded_is_assumed_to_decode_like_the_others() -> None:
    new = replace(IDLE, rates=UNMEASURED)
    slow = msgspec.structs.replace(RATES, decode=DecodeRate(0.1, 0.0))
    assert place(BUSY, new).decode.worker_id == "p0"
    # 0.1 s for a step is ten times the default, which is nothing that the worker has measured.
    assert place(replace(BUSY, rates=slow), new).decode.worker_id == "d0"


def test_the_less_busy_of_two_prefill_workers_decodes() -> None:
    others = worker("p0", num_running=3), worker("p1")
    placement = place(BUSY, *others)
    assert placement.decode.worker_id == "p1"


def test_a_worker_that_refused_the_request_does_not_decode_it() -> None:
    placement = place(BUSY, IDLE, refused=frozenset({IDLE.epoch}))
    assert placement.decode.worker_id == "d0"


def test_named_workers_are_kept() -> None:
    """A hint or a request's other completions name their workers."""
    assert place(BUSY, IDLE, required_prefill="p0").decode.worker_id == "d0"
    assert place(BUSY, IDLE, required_decode="d0").decode.worker_id == "d0"
    child = place(worker("d0"), IDLE, worker("p1"), required_decode="p0")
    assert child.decode.worker_id == "p0"
    assert child.prefill_candidates == ()


def test_a_prefill_worker_does_not_stand_in_for_missing_decode_workers() -> None:
    assert choose(WORK, [IDLE], {}, Random(0)) is None
