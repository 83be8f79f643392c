"""Gathers what the choice of a place to prefill needs to know: records, rates, own load.

Other workers' load and rates are those of their records, a second old or two; what this worker
itself has sent to a candidate since is counted in.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tandem.config.worker import WorkerConfig
from tandem.perf_model.predict import Holder, believed, beside_decode, likely_rates
from tandem.perf_model.rates import PairRate, WorkerRates, default_pair
from tandem.perf_model.soonest import Producer
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.store.registry import WorkerRecord
from tandem.store.silence import Silences
from tandem.worker.decode.prefill_choice import (
    Candidate,
    Here,
    PrefillPlan,
    Prompt,
    plan_prefill,
    soonest_producer,
)
from tandem.worker.peers.rates import Rates

_FAILED_TOLD_S = 30.0
_WHY_MAX = 300  # characters
_Asked = TypeVar("_Asked", pb.PrefillCandidate, pb.PrefixHolder)


class PrefillPlanner:
    """Plans where prompts are prefilled. The worker sets `load`, its own, and calls `update` with
    the records of all workers."""

    def __init__(self, config: WorkerConfig, rates: Rates) -> None:
        self._config = config
        self._rates = rates
        self._block_size = config.engine.block_size
        self._records: dict[str, WorkerRecord] = {}
        self._silences = Silences(config.cluster)
        self._tokens_sent: dict[str, int] = {}  # worker id -> tokens asked for and not there yet
        self._failed: dict[str, tuple[str, str, float]] = {}  # epoch, why, and when
        self.load = pb.WorkerLoad()

    def update(self, records: Iterable[WorkerRecord]) -> None:
        self._records = {record.worker_id: record for record in records}
        self._silences.note(self._records.values(), time.monotonic())

    def note_lost(self, worker_id: str) -> None:
        """Notes that a lease of this worker was lost, so that no other lease waits for it, too."""
        self._silences.note_lost(worker_id, time.monotonic())

    def note_failed(self, worker_id: str, epoch: str, why: str) -> None:
        """Notes that a lease of this process was lost, for operators."""
        self._failed[worker_id] = (epoch, why[:_WHY_MAX], time.monotonic())

    def note_whole(self, worker_id: str) -> None:
        """Notes that a lease of this worker was whole."""
        self._failed.pop(worker_id, None)

    @property
    def failed(self) -> dict[str, str]:
        """Returns the live workers whose last lease was lost recently, and why."""
        since = time.monotonic() - _FAILED_TOLD_S
        self._failed = {
            worker_id: (epoch, why, at)
            for worker_id, (epoch, why, at) in self._failed.items()
            if at > since and (record := self._records.get(worker_id)) and record.epoch == epoch
        }
        return {worker_id: why for worker_id, (_, why, _) in self._failed.items()}

    def is_silent(self, worker_id: str) -> bool:
        """Returns whether this worker has not written its record in time."""
        return self._silences.silent_s(worker_id) > 0

    def alive(self, workers: Iterable[_Asked]) -> list[_Asked]:
        """Returns the candidates or prefix holders that are worth waiting for."""
        now = time.monotonic()
        return [w for w in workers if not self._silences.is_lost(w.worker_id, now)]

    @contextmanager
    def sent(self, worker_id: str, num_tokens: int) -> Iterator[None]:
        """Counts the tokens of a candidate while it prefills them for a sequence here."""
        self._tokens_sent[worker_id] = self._tokens_sent.get(worker_id, 0) + num_tokens
        try:
            yield
        finally:
            self._tokens_sent[worker_id] -= num_tokens
            if not self._tokens_sent[worker_id]:
                del self._tokens_sent[worker_id]

    def plan(
        self,
        candidates: Sequence[pb.PrefillCandidate],
        holders: Sequence[pb.PrefixHolder],
        waits_s: dict[str, float],
        *,
        num_tokens: int,
        cached_tokens: int,
    ) -> PrefillPlan:
        """Plans which candidates to ask, by measured rates. Until a prefill has been measured, all
        workers count as equally fast, and the rates of their pairs decide."""
        if self._config.transfer.prefill_at == "remote":
            return PrefillPlan(tuple(c.worker_id for c in candidates), 0.0, "forced")
        prompt = Prompt(num_tokens, self._block_size)
        here = Here(
            # Its delay for those who decode here is counted by the choice.
            rates=beside_decode(self._believed(self._rates.worker), self.load.chunk_tokens, 0),
            queued_tokens=self.load.queued_tokens,
            cached_tokens=cached_tokens,
            holders=tuple(self._holders(holders, self._config.worker_id)),
            num_running=self.load.num_running,
        )
        own_holder = pb.PrefixHolder(
            worker_id=self._config.worker_id, num_blocks=cached_tokens // self._block_size
        )
        places = [
            self._candidate(c, [*holders, own_holder], waits_s.get(c.worker_id, 0.0))
            for c in candidates
        ]
        return plan_prefill(prompt, here, places)

    def producer(
        self,
        candidates: Sequence[pb.PrefillCandidate],
        holders: Sequence[pb.PrefixHolder],
        num_tokens: int,
    ) -> Producer | None:
        """Returns the candidate that would have the prompt's KV here soonest; None if prompts are
        always prefilled remotely, so that nothing is to be compared."""
        if self._config.transfer.prefill_at == "remote":
            return None
        places = [self._candidate(c, holders, 0.0) for c in candidates]
        return soonest_producer(Prompt(num_tokens, self._block_size), places)

    def _candidate(
        self, candidate: pb.PrefillCandidate, holders: Sequence[pb.PrefixHolder], wait_s: float
    ) -> Candidate:
        name = candidate.worker_id
        record = self._records.get(name)
        queued = record.load.queued_tokens if record is not None else 0
        told = self._rates.worker if record is None else record.rates
        return Candidate(
            rates=self._believed(told),
            queued_tokens=max(queued, self._tokens_sent.get(name, 0)),
            cached_tokens=(candidate.cached_blocks + candidate.loaded_blocks) * self._block_size,
            holders=tuple(self._holders(holders, name)),
            worker_id=name,
            pair=self._pair(name, self._config.worker_id),
            wait_s=wait_s,
            load_s=candidate.load_s,
            given=self._pair(self._config.worker_id, name),
        )

    def _holders(self, holders: Iterable[pb.PrefixHolder], consumer: str) -> Iterator[Holder]:
        for holder in holders:
            if holder.worker_id != consumer and holder.num_blocks:
                rate = self._pair(holder.worker_id, consumer)
                yield Holder(holder.num_blocks * self._block_size, rate)

    def _pair(self, producer: str, consumer: str) -> PairRate:
        """Returns the rate from one worker to another: the consumer's own, or a first guess."""
        if consumer == self._config.worker_id:
            rate = self._rates.pairs.get(producer)
        else:
            record = self._records.get(consumer)
            rate = record.pairs.get(producer) if record is not None else None
        return rate or default_pair(self._config.transfer.transport)

    def _believed(self, told: WorkerRates) -> WorkerRates:
        """Returns the rates to count with: workers of one cluster are likely to be alike."""
        others = (record.rates for record in self._records.values())
        return believed(told, likely_rates((self._rates.worker, *others)))
