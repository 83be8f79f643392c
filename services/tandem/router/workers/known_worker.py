"""Represents one worker in this router: its record, its stream, and the work sent since its report.

A reported load is always a little old. A prefill worker reports its load in its record, and a
decode worker on its stream. The router corrects the load in two ways:
- The router adds work that it has sent and that the reported load cannot include yet.
- The router subtracts work that a prefill worker has finished since its last record. The router
  knows this from the first tokens, which arrive long before the next record.

For example, a worker's record reports a queue of 3 s. Since then, the router has sent a prompt of
1 s and received the first token of a prompt of 0.5 s. The router then expects a queue of 3.5 s.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from tandem.common.perf_model.predict import NO_PREFILL, Prefill, beside_decode, summed
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.registry import WorkerRecord
from tandem.router.placement.choose import WorkerSnapshot
from tandem.router.workers.client import WorkerClient


@dataclass(slots=True)
class KnownWorker:
    """A worker as this router knows it. Only workers that decode have a client."""

    record: WorkerRecord
    client: WorkerClient | None = None
    # The worker's clock minus this router's clock in seconds, one value for each of the last three
    # records. A delay of a record makes its value wrong, so one value is not enough.
    clocks: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    # Prompts sent to this prefill worker that the load in its record does not include yet. Each is
    # (monotonic time of sending, prefill work).
    _sent: deque[tuple[float, Prefill]] = field(default_factory=deque)
    # Prefill work that is part of the last record's load and that the worker has finished since.
    _done: Prefill = NO_PREFILL

    @property
    def decodes(self) -> bool:
        """True if the worker accepts requests to decode, on a stream of this router."""
        client = self.client
        return client is not None and client.is_up and not client.is_draining

    @property
    def load(self) -> WorkerLoad:
        """The last load that the worker reported. A decode worker reports it on its stream or in
        its record, and a prefill worker in its record."""
        client = self.client if self.record.role == "decode" else None
        reported = client.load if client is not None else None
        return (
            reported
            if reported is not None and reported.step >= self.record.load.step
            else self.record.load
        )

    @property
    def num_queued(self) -> int:
        """Number of sequences in the worker's queue, with those that this router has sent and that
        the reported load does not include yet."""
        num_unreported = len(self.client.unreported) if self.client is not None else 0
        return self.load.num_waiting + num_unreported

    @property
    def has_work(self) -> bool:
        """True if the worker runs or holds anything, as far as this router knows."""
        load = self.load
        return bool(load.num_running or load.num_leases or self.num_queued or self._sent)

    @property
    def clock_ahead_s(self) -> float:
        """The worker's clock minus this router's clock, in seconds.

        It is 0 until several records have been read.
        """
        return min(self.clocks, key=abs) if len(self.clocks) == self.clocks.maxlen else 0.0

    @property
    def is_up(self) -> bool:
        return self.client is not None and self.client.is_up

    @property
    def why_down(self) -> str:
        """The reason why the worker's stream is down; "" if the stream never failed."""
        return self.client.why_down if self.client is not None else ""

    def note_prefill(self, prefill: Prefill, now: float, *, forgotten_before: float) -> None:
        self._drop_sent(forgotten_before)
        self._sent.append((now, prefill))

    def note_prefilled(self, prefill: Prefill, sent_at: float, *, by_it: bool) -> None:
        """Records that the prompt sent at `sent_at` no longer waits on this worker.

        `by_it` is True if this worker computed the prompt, and False if another worker did.
        """
        if (sent_at, prefill) in self._sent:
            self._sent.remove((sent_at, prefill))
        elif by_it:
            self._done = summed([self._done, prefill])

    def take_record(
        self, record: WorkerRecord, *, last_read_at: float, forgotten_before: float
    ) -> bool:
        """Takes a new record; returns whether the worker's snapshot for placement changes.

        `last_read_at` is the time at which the previous record was read. If the load in the new
        record differs, the worker has measured the load after that time. So the new load includes
        all work sent before `last_read_at`, and this work is no longer added. Work sent before
        `forgotten_before` is not added either, because it may never have reached the worker.
        """
        num_sent = len(self._sent)
        self._drop_sent(forgotten_before)
        if record.load != self.record.load:
            self._done = NO_PREFILL
            self._drop_sent(last_read_at)
        changed = record != self.record or len(self._sent) != num_sent
        self.record = record
        return changed

    def _drop_sent(self, before: float) -> None:
        while self._sent and self._sent[0][0] < before:
            self._sent.popleft()

    def snapshot(self, *, compatible: bool, prefill_share: float = 0.0) -> WorkerSnapshot:
        record = self.record
        client = self.client
        is_decode = record.role == "decode"
        return WorkerSnapshot(
            worker_id=record.worker_id,
            epoch=record.epoch,
            address=record.address,
            role=record.role,
            state="draining" if is_decode and client and client.is_draining else record.state,
            reachable=compatible and (not is_decode or self.is_up),
            load=self._expected_load(),
            rates=record.rates,
            pairs=record.pairs,
            compatibility_key=record.compatibility.compatibility_key(),
            prefill_share=prefill_share,
            adapters=frozenset(record.adapters.loaded),
            adapters_failed=frozenset(record.adapters.failed),
            lora_rank_max=record.adapters.rank_max,
            keeps_deadlines=record.keeps_deadlines,
            prefill_at=record.prefill_at,
            decodes=not is_decode and self.decodes,
        )

    def _expected_load(self) -> WorkerLoad:
        """Returns the reported load plus the work sent since, minus the work finished since."""
        load = self.load
        client = self.client
        unreported = client.unreported if client is not None else ()
        done = self._done
        if client is not None and self.record.role == "prefill":
            # The record may lack sequences that this router has sent to decode.
            num_running = max(load.num_running, client.num_inflight)
            load = msgspec.structs.replace(load, num_running=num_running)
        if not (unreported or self._sent or done.num_tokens):
            return load
        sent = summed([*unreported, *(prefill for _, prefill in self._sent)])
        queued_s = load.queued_s
        if queued_s is not None and (sent.num_tokens or done.num_tokens):
            rates = beside_decode(self.record.rates, load.chunk_tokens, load.num_others)
            queued_s = max(0.0, queued_s - done.seconds(rates)) + sent.seconds(rates)
        return msgspec.structs.replace(
            load,
            num_waiting=self.num_queued,
            queued_tokens=max(0, load.queued_tokens - done.num_tokens) + sent.num_tokens,
            queued_s=queued_s,
            num_leases=load.num_leases + len(self._sent),
        )
