"""Collects the inputs for the choice of a prefill worker: each worker's queue and rates.

The queue and the rates of another worker come from the record of that worker, which is one or two
seconds old. The record may lack prompts that this worker has just sent. So the queue of a candidate
is the larger of two times: the time in the record, and the time of the unfinished prefills that
this worker has sent to the candidate. For example, a record says 0.1 s, and this worker has sent
prompts that take 0.4 s. The queue then counts as 0.4 s.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.predict import (
    OWN_SPARE,
    RATES_OFF,
    Holder,
    believed,
    beside_decode,
    likely_rates,
    prefill_seconds,
)
from tandem.common.perf_model.rates import PairRate, WorkerRates, default_pair
from tandem.common.perf_model.soonest import Producer
from tandem.common.worker_load import WorkerLoad
from tandem.engine.types import SequenceSpec
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import WorkerRecord
from tandem.net.store.silence import Silences
from tandem.worker.decode.prefill_choice import (
    Candidate,
    LocalWorker,
    PrefillPlan,
    PrefillPrompt,
    plan_prefill,
    soonest_producer,
)
from tandem.worker.peers.rates import Rates

_FAILED_REPORT_S = 30.0
_WHY_MAX = 300  # a reason is cut to this many characters
# A sum of predicted seconds below this value is a rounding error and counts as 0, because every
# prompt takes longer.
_SENT_MIN_S = 1e-9
_Worker = TypeVar("_Worker", pb.PrefillCandidate, pb.PrefixHolder)


class PrefillPlanner:
    """Plans where prompts are prefilled.

    The worker calls `take_load` with its own load and `update` with the records of all workers.
    """

    def __init__(self, config: WorkerConfig, rates: Rates) -> None:
        self._config = config
        self._rates = rates
        self._block_size = config.engine.block_size
        self._records: dict[str, WorkerRecord] = {}
        self._silences = Silences(config.cluster)
        # worker id -> predicted seconds of the unfinished prefills that this worker has sent there
        self._sent_s: dict[str, float] = {}
        # Each local prefill that `load` does not include yet: (number of the engine command that
        # starts the prefill, predicted seconds).
        self._begun_locally: deque[tuple[int, float]] = deque()
        # worker id -> (epoch of the worker, reason and time of its last lost lease)
        self._failed: dict[str, tuple[str, str, float]] = {}
        self.load = WorkerLoad()

    def update(self, records: Iterable[WorkerRecord]) -> None:
        self._records = {record.worker_id: record for record in records}
        self._silences.note(self._records.values(), time.monotonic())

    def note_lost(self, worker_id: str) -> None:
        """Records that a lease with a prefill worker was lost because that worker was silent.

        `alive` then leaves the worker out, so that no other lease waits for it.
        """
        self._silences.note_lost(worker_id, time.monotonic())

    def note_failed(self, worker_id: str, epoch: str, why: str) -> None:
        """Records why a lease with a prefill worker was lost. Operators see the reason."""
        self._failed[worker_id] = (epoch, why[:_WHY_MAX], time.monotonic())

    def note_success(self, worker_id: str) -> None:
        """Records that a lease with a prefill worker succeeded. Deletes its recorded failure."""
        self._failed.pop(worker_id, None)

    @property
    def failed(self) -> dict[str, str]:
        """Worker id -> reason, for each live worker whose last lease was lost recently."""
        since = time.monotonic() - _FAILED_REPORT_S
        self._failed = {
            worker_id: (epoch, why, at)
            for worker_id, (epoch, why, at) in self._failed.items()
            if at > since and (record := self._records.get(worker_id)) and record.epoch == epoch
        }
        return {worker_id: why for worker_id, (_, why, _) in self._failed.items()}

    def is_silent(self, worker_id: str) -> bool:
        """Returns whether the worker's record in Redis is overdue."""
        return self._silences.silent_s(worker_id) > 0

    def alive(self, workers: Iterable[_Worker]) -> list[_Worker]:
        """Returns the candidates or prefix holders that are not known to be lost."""
        now = time.monotonic()
        return [w for w in workers if not self._silences.is_lost(w.worker_id, now)]

    def take_load(self, load: WorkerLoad, num_commands: int) -> None:
        """Sets this worker's load, measured after its engine had applied `num_commands` commands.

        Local prefills that were started by these commands are part of this load.
        """
        self.load = load
        while self._begun_locally and self._begun_locally[0][0] <= num_commands:
            self._begun_locally.popleft()

    def note_local_prefill(self, num_commands: int, prefill_s: float) -> None:
        """Records a local prefill of `prefill_s` seconds, started by engine command
        `num_commands`.
        """
        self._begun_locally.append((num_commands, prefill_s))

    @contextmanager
    def sent(self, worker_id: str, num_tokens: int, cached_tokens: int) -> Iterator[None]:
        """Counts a prompt in the queue of a candidate while the candidate prefills the prompt."""
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
        is_batch: bool = False,
    ) -> PrefillPlan:
        """Plans which candidates to try, by measured rates.

        Until a prefill has been measured, all workers count as equally fast, and only the transfer
        rates between workers make a difference. Lines of batches (`is_batch`) are prefilled
        remotely unless half of the prompt is cached: here they would pause while other sequences
        are computed.
        """
        stays_away = is_batch and 2 * cached_tokens < num_tokens
        if stays_away or self._config.transfer.prefill_at == "remote":
            return PrefillPlan(tuple(c.worker_id for c in candidates), 0.0, "forced")
        prompt = PrefillPrompt(num_tokens, self._block_size)
        local = self._local_worker(holders, cached_tokens)
        own_holder = pb.PrefixHolder(
            worker_id=self._config.worker_id, num_blocks=cached_tokens // self._block_size
        )
        options = [
            self._candidate(c, [*holders, own_holder], waits_s.get(c.worker_id, 0.0))
            for c in candidates
        ]
        return plan_prefill(prompt, local, options)

    def late_if_local_s(self, spec: SequenceSpec, cached_tokens: int) -> float:
        """Predicts by how many seconds a locally computed first token would miss its deadline.

        A result of 0 or less means that the token is in time. The result is also 0 if the request
        has no deadline, if this worker has nothing else to do, or if no prefill was measured yet.
        """
        local = self._local_worker((), cached_tokens)
        is_idle = not local.queue_s and not local.num_running
        if not spec.first_token_by or is_idle or not local.rates.measured:
            return 0.0
        # The queue may be shorter than predicted. The own prompt comes next, so its time is known
        # better.
        own_s = prefill_seconds(local.rates, len(spec.token_ids), cached_tokens)
        expected_s = local.queue_s / RATES_OFF + OWN_SPARE * own_s
        return expected_s - (spec.first_token_by - time.monotonic())

    def local_prefill_seconds(self, num_tokens: int, cached_tokens: int) -> float:
        """Predicts the seconds to compute a prompt locally with an empty queue."""
        return prefill_seconds(self._local_rates(), num_tokens, cached_tokens)

    def _local_rates(self) -> WorkerRates:
        # Running sequences are left out here (0), because prefill_choice.py adds their delay.
        return beside_decode(self._believed(self._rates.worker), self.load.chunk_tokens, 0)

    def _local_worker(self, holders: Sequence[pb.PrefixHolder], cached_tokens: int) -> LocalWorker:
        rates = self._local_rates()
        return LocalWorker(
            rates=rates,
            queue_s=self.load.queue_s(rates) + sum(seconds for _, seconds in self._begun_locally),
            cached_tokens=cached_tokens,
            holders=tuple(self._holders(holders, self._config.worker_id)),
            num_running=self.load.num_others,
        )

    def producer(
        self,
        candidates: Sequence[pb.PrefillCandidate],
        holders: Sequence[pb.PrefixHolder],
        num_tokens: int,
    ) -> Producer | None:
        """Returns the candidate that would deliver the prompt's KV soonest.

        The engine compares this candidate with loading blocks from a tier. If prompts are always
        prefilled remotely, there is nothing to compare, and the result is None.
        """
        if self._config.transfer.prefill_at == "remote":
            return None
        options = [self._candidate(c, holders, 0.0) for c in candidates]
        return soonest_producer(PrefillPrompt(num_tokens, self._block_size), options)

    def _candidate(
        self, candidate: pb.PrefillCandidate, holders: Sequence[pb.PrefixHolder], wait_s: float
    ) -> Candidate:
        name = candidate.worker_id
        record = self._records.get(name)
        rates = self._rates_of(name)
        queue_s = 0.0
        if record is not None:
            load = record.load
            queue_s = load.queue_s(rates)
            if load.num_others:  # it also decodes
                rates = beside_decode(rates, load.chunk_tokens, load.num_others)
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
                yield Holder(holder.num_blocks * self._block_size, rate, holder.load_s)

    def _pair(self, producer: str, consumer: str) -> PairRate:
        """Returns the transfer rate from one worker to another.

        This is the rate that the consumer measured, or a default if nothing was measured.
        """
        if consumer == self._config.worker_id:
            rate = self._rates.pairs.get(producer)
        else:
            record = self._records.get(consumer)
            rate = record.pairs.get(producer) if record is not None else None
        return rate or default_pair(self._config.transfer.transport)

    def _rates_of(self, worker_id: str) -> WorkerRates:
        record = self._records.get(worker_id)
        return self._believed(self._rates.worker if record is None else record.rates)

    def _believed(self, measured: WorkerRates) -> WorkerRates:
        """Returns the rates to assume for a worker: the measured ones, or likely ones if there are
        none.

        The likely rates are those of other workers, because workers of one cluster are assumed to
        be similar.
        """
        others = (record.rates for record in self._records.values())
        return believed(measured, likely_rates((self._rates.worker, *others)))
