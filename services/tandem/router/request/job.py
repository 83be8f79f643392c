"""A prepared request, what became of it so far, and what a worker is told of it.

Knows token ids, not text. What was made so far goes with the prompt wherever the request moves, and
sampling is seeded by position: so it makes the same tokens there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.block_hash import block_hash
from tandem.errors import NeverFits
from tandem.router.admission.calibration import Promise
from tandem.router.metrics.timeline import Timeline
from tandem.router.placement.choose import Placement, WorkerSnapshot
from tandem.router.request.move_budget import LOSSES_MAX
from tandem.router.request.request import GenerationRequest
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.store.registry import Contract


@dataclass(slots=True)
class Job:
    """One request on its way, and what became of it so far."""

    request: GenerationRequest
    seed: int
    token_ids: list[int]
    block_hashes: list[bytes]  # of the prompt, later of what was made too, as far as it was needed
    max_tokens: int
    stop_token_ids: list[int]
    cache_salt: bytes = b""
    made: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, where its first token was made
    is_admitted: bool = False
    promise: Promise | None = None  # of its first token, while none came and it did not move
    num_submissions: int = 0
    num_moves: int = 0
    num_lost: int = 0  # workers, prefill or decode
    homeless_since: float | None = None  # monotonic seconds: no worker has it, and one had
    leaves: str = ""  # id of the worker that it moves off while that still has its blocks
    stays_until: float = -math.inf  # monotonic seconds: no worker was found for it to move to
    refused: set[str] = field(default_factory=set)  # epochs of workers that did not take it
    retry_after_s: float | None = None  # the shortest that a full worker named
    never_fits: NeverFits | None = None  # what a worker said whose KV pool is too small for it
    placement: Placement | None = None
    matches: dict[str, int] = field(default_factory=dict)  # that it was placed by
    reason: str = ""  # for the placement, in one line
    asked: tuple[str, int, float] | None = None  # a prefill worker: who, for how many tokens, when
    timings: pb.SequenceTimings | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def num_tokens(self) -> int:
        """Of the model's input: the prompt, and what was made of the answer."""
        return len(self.token_ids) + len(self.made)

    def hashes(self, contract: Contract | None) -> list[bytes]:
        """Of all full blocks of the input; of the prompt's only while no contract is known."""
        if contract is None or not self.made:
            return self.block_hashes
        size = contract.block_size
        parent = self.block_hashes[-1] if self.block_hashes else None
        for start in range(len(self.block_hashes) * size, self.num_tokens - size + 1, size):
            parent = parent or contract.chain_root(self.cache_salt)
            parent = block_hash(parent, self._tokens(start, start + size))
            self.block_hashes.append(parent)
        return self.block_hashes

    def _tokens(self, start: int, end: int) -> list[int]:
        """Of the input, without a copy of all of it."""
        prompt = len(self.token_ids)
        return self.token_ids[start:end] + self.made[max(0, start - prompt) : max(0, end - prompt)]


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of a job; `finish_reason` ("stop" or "length") only in the last step."""

    token_ids: list[int]
    finish_reason: str = ""


def submission(
    job: Job,
    placement: Placement,
    matches: Mapping[str, int],
    leaves: WorkerSnapshot | None = None,
) -> pb.SubmitSequence:
    """`leaves`: the worker that it moves off while that still has all of its blocks."""
    sampling, trace = job.request.sampling, job.timeline.span.headers
    holders = [(w, matches[w.worker_id]) for w in placement.prefix_holders]
    if leaves is not None:
        holders.insert(0, (leaves, len(job.block_hashes)))
    return pb.SubmitSequence(
        request_id=job.request.request_id,
        attempt=job.num_submissions,
        input=pb.SequenceInput(
            token_ids=job.token_ids + job.made,
            num_prompt_tokens=len(job.token_ids),
            sampling=pb.Sampling(
                temperature=sampling.effective_temperature,
                top_k=max(0, sampling.top_k),
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=job.seed,
            ),
            max_tokens=job.max_tokens,
            stop_token_ids=job.stop_token_ids,
            cache_salt=job.cache_salt,
        ),
        prefill_candidates=[
            pb.PrefillCandidate(
                worker_id=w.worker_id,
                epoch=w.epoch,
                address=w.address,
                cached_blocks=matches.get(w.worker_id, 0),
            )
            for w in placement.prefill_candidates
        ],
        prefix_holders=[
            pb.PrefixHolder(
                worker_id=w.worker_id, epoch=w.epoch, address=w.address, num_blocks=num_blocks
            )
            for w, num_blocks in holders
        ],
        trace=pb.TraceContext(**trace) if trace else None,
        losses_max=max(1, LOSSES_MAX - job.num_lost),
    )
