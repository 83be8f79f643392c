"""Gathers what the choice of a place to prefill needs to know: records, rates, own load.

Other workers' load and rates are those of their records, a second old or two; what this worker
itself has sent to a candidate since is counted in.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.predict import (
    RATES_OFF,
    Holder,
    believed,
    beside_decode,
    likely_rates,
    prefill_seconds,
    queue_seconds,
)
from tandem.common.perf_model.rates import PairRate, WorkerRates, default_pair
from tandem.common.perf_model.soonest import Producer
from tandem.engine.types import SequenceSpec
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import WorkerRecord
from tandem.net.store.silence import Silences
from tandem.worker.decode.prefill_choice import (
    Candidate,
    Here,
    PrefillPlan,
    PrefillPrompt,
    plan_prefill,
    soonest_producer,
)
from tandem.worker.peers.rates import Rates

_FAILED_TOLD_S = 30.0
_WHY_MAX = 300  # characters
_SENT_MIN_S = 1e-9  # less than any prompt takes: what rounding leaves of sums
_Asked = TypeVar("_Asked", pb.PrefillCandidate, pb.PrefixHolder)


class PrefillPlanner:
    """Plans where prompts are prefilled. The worker tells its own load with `take_load`, and calls
    `update` with the records of all workers."""

    def __init__(self, config: WorkerConfig, rates: Rates) -> None:
        self._config = config
        self._rates = rates
        self._block_size = config.engine.block_size
        self._records: dict[str, WorkerRecord] = {}
        self._silences = Silences(config.cluster)
        self._sent_s: dict[str, float] = {}  # worker id -> prefill asked for and not there yet
        # Prefill begun here that no load shows yet: the engine's commands by then, and seconds.
        self._begun_here: deque[tuple[int, float]] = deque()
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

    def take_load(self, load: pb.WorkerLoad, num_commands: int) -> None:
        """Takes this worker's load after its engine applied so many commands."""
        self.load = load
        while self._begun_here and self._begun_here[0][0] <= num_commands:
            self._begun_here.popleft()

    def note_begun_here(self, num_commands: int, prefill_s: float) -> None:
        """Notes a prompt that the engine computes once it applied so many commands."""
        self._begun_here.append((num_commands, prefill_s))

    @contextmanager
    def sent(self, worker_id: str, num_tokens: int, cached_tokens: int) -> Iterator[None]:
        """Counts a prompt while a candidate prefills it for a sequence here."""
        seconds = prefill_seconds(self._rates_of(worker_id), num_tokens, cached_tokens)
        self._sent_s[worker_id] = self._sent_s.get(worker_id, 0.0) + seconds
        try:
            yield
        finally:
            self._sent_s[worker_id] -= seconds
            if self._sent_s[worker_id] < _SENT_MIN_S:
                del self._sent_s[worker_id]

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
        prompt = PrefillPrompt(num_tokens, self._block_size)
        here = self._here(holders, cached_tokens)
        own_holder = pb.PrefixHolder(
            worker_id=self._config.worker_id, num_blocks=cached_tokens // self._block_size
        )
        places = [
            self._candidate(c, [*holders, own_holder], waits_s.get(c.worker_id, 0.0))
            for c in candidates
        ]
        return plan_prefill(prompt, here, places)

    def late_here_s(self, spec: SequenceSpec, cached_tokens: int) -> float:
        """Predicts by how many seconds the first token of a prompt would come too late if it was
        computed here. Not above 0: it is in time, or nothing was measured."""
        here = self._here((), cached_tokens)
        if not spec.first_token_by or not here.queue_s or not here.rates.measured:
            return 0.0
        own_s = prefill_seconds(here.rates, len(spec.token_ids), cached_tokens)
        return (here.queue_s + own_s) / RATES_OFF - (spec.first_token_by - time.monotonic())

    def here_seconds(self, num_tokens: int, cached_tokens: int) -> float:
        """Predicts the seconds to compute a prompt here, with nothing queued."""
        return prefill_seconds(self._here_rates(), num_tokens, cached_tokens)

    def _here_rates(self) -> WorkerRates:
        # Its delay for those who decode here is counted by the choice.
        return beside_decode(self._believed(self._rates.worker), self.load.chunk_tokens, 0)

    def _here(self, holders: Sequence[pb.PrefixHolder], cached_tokens: int) -> Here:
        rates = self._here_rates()
        load = self.load
        told_s = load.queued_s if load.HasField("queued_s") else None
        queue_s = queue_seconds(rates, load.queued_tokens) if told_s is None else told_s
        return Here(
            rates=rates,
            queue_s=queue_s + sum(seconds for _, seconds in self._begun_here),
            cached_tokens=cached_tokens,
            holders=tuple(self._holders(holders, self._config.worker_id)),
            num_running=load.num_running,
        )

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
        return soonest_producer(PrefillPrompt(num_tokens, self._block_size), places)

    def _candidate(
        self, candidate: pb.PrefillCandidate, holders: Sequence[pb.PrefixHolder], wait_s: float
    ) -> Candidate:
        name = candidate.worker_id
        record = self._records.get(name)
        rates = self._rates_of(name)
        queue_s = 0.0
        if record is not None:
            queue_s = record.load.queue_s(rates)
        return Candidate(
            rates=rates,
            queue_s=max(queue_s, self._sent_s.get(name, 0.0)),
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

    def _rates_of(self, worker_id: str) -> WorkerRates:
        record = self._records.get(worker_id)
        return self._believed(self._rates.worker if record is None else record.rates)

    def _believed(self, told: WorkerRates) -> WorkerRates:
        """Returns the rates to count with: workers of one cluster are likely to be alike."""
        others = (record.rates for record in self._records.values())
        return believed(told, likely_rates((self._rates.worker, *others)))
