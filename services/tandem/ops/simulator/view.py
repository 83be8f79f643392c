"""The simulated router's view of the workers, on which the placement policy decides.

A worker reports its load when it has changed, one report at a time. The router receives a report
`report_age_s` later. The view adds the work that the router has sent to the worker since the worker
made the report: if a report made at 10.0 s arrives at 10.5 s, the prompts sent between these times
are added. The router sees first tokens without delay. They correct the workers' prefill shares
(recent seconds of prefill, shares.py) and show the workers' true speeds (pace.py).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.common.perf_model.predict import (
    NO_PREFILL,
    Prefill,
    beside_decode,
    prefill_seconds,
    summed,
)
from tandem.common.perf_model.rates import PairRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.pace import Paces, Sent, paced
from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.workers.worker import SimulatedWorker
from tandem.router.placement.choose import Roster, WorkerSnapshot
from tandem.router.placement.shares import Shares


@dataclass(slots=True)
class _Known:
    worker: SimulatedWorker
    load: WorkerLoad
    rates: WorkerRates  # rates that the worker reported, corrected by the observed speed
    # Seconds from the worker's report to the end of the loads from tiers that were running then.
    load_queue_s: float = 0.0
    # (time, prefill work) of each request that the router has sent since the worker made its
    # report.
    sent: deque[tuple[float, Prefill]] = field(default_factory=deque)
    # Number of requests that this prefill worker also decodes and that have not ended.
    num_staying: int = 0
    reporting: bool = False
    changed: bool = False


class View:
    """The simulated router's view of all workers. Callers call `tick` and then read `roster`, which
    `tick` may replace by a new object."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        workers: list[SimulatedWorker],
        on_news: Callable[[], None],
    ) -> None:
        """`on_news` is called after each report and first token that the router sees."""
        self._scenario = scenario
        self._on_news = on_news
        self._clock = clock
        self._known = {w.worker_id: _Known(w, w.load(), scenario.rates) for w in workers}
        self._shares = Shares()
        self._paces = Paces(self._shares)
        for worker in workers:
            self._join(worker.worker_id, 0.0)
        self._pairs: dict[str, PairRate] = {w.worker_id: scenario.pair for w in workers}
        self.roster = Roster(self._snapshot(known) for known in self._known.values())

    def tick(self) -> None:
        """Updates `roster` to the current time, because older prefill work counts less in the
        workers' shares. Callers must call this method before they read `roster`."""
        now_s = self._clock.now_s
        if self._shares.rebase(now_s):
            # `rebase` has rescaled all shares. The roster contains sums of shares, so a new roster
            # is made.
            self.roster = Roster(self._snapshot(known) for known in self._known.values())
        self.roster.second_weight = self._shares.second_weight(now_s)
        self.roster.full_share = self._shares.full_share(now_s)

    def note_prefill(
        self, worker_id: str, num_tokens: int, missing: int, *, may_pull: bool
    ) -> Sent:
        """Records that a prompt of `num_tokens` tokens was sent to a worker, which must prefill
        `missing` of them."""
        known = self._known[worker_id]
        reported = self._scenario.rates
        load = known.load
        rates = beside_decode(reported, load.chunk_tokens, load.num_running)
        predicted_s = prefill_seconds(rates, num_tokens, num_tokens - missing)
        sent = self._paces.sent(worker_id, predicted_s, self._clock.now_s, may_pull=may_pull)
        self.note_sent(worker_id, Prefill.of(missing, num_tokens - missing))
        return sent

    def note_sent(self, worker_id: str, prefill: Prefill = NO_PREFILL) -> None:
        known = self._known[worker_id]
        known.sent.append((self._clock.now_s, prefill))
        self._refresh(known)

    def note_staying(self, worker_id: str, count: int) -> None:
        """Adds to the number of requests that decode on a prefill worker."""
        known = self._known[worker_id]
        known.num_staying += count
        self._refresh(known)

    def note_first_token(self, sent: Sent, worker_id: str) -> None:
        self.tick()
        self._paces.first_token(sent, worker_id, self._clock.now_s)
        known = self._known[worker_id]
        known.rates = paced(self._scenario.rates, self._paces.of(worker_id))
        self._refresh(known)
        if sent.worker_id != worker_id:
            self._refresh(self._known[sent.worker_id])
        self._on_news()

    def note_state(self, worker: SimulatedWorker) -> None:
        """Records that a worker started or stopped. The router learns this without delay."""
        known = self._known[worker.worker_id]
        known.sent.clear()
        known.load = worker.load()
        known.rates = self._scenario.rates
        known.load_queue_s = 0.0
        self._join(worker.worker_id, self.roster.mean_prefill_share(worker.role))
        self._refresh(known)

    def note_drain(self, worker: SimulatedWorker) -> None:
        """Records that a worker drains. The router learns this without delay."""
        self._refresh(self._known[worker.worker_id])

    def note_load(self, worker: SimulatedWorker) -> None:
        known = self._known[worker.worker_id]
        known.changed = True
        if not known.reporting:
            self._report(known)

    def _join(self, worker_id: str, placed: float) -> None:
        self._shares.join(worker_id, placed)
        self._paces.join(worker_id)

    def _report(self, known: _Known) -> None:
        known.reporting = True
        known.changed = False
        load = known.worker.load()
        now_s = self._clock.now_s
        tiers = known.worker.tiers
        load_queue_s = 0.0 if tiers is None else tiers.queue_s(now_s)
        arrives = (known, load, load_queue_s, now_s, known.worker.epoch)
        self._clock.after(self._scenario.report_age_s, self._take, *arrives)

    def _take(
        self, known: _Known, load: WorkerLoad, load_queue_s: float, taken_s: float, epoch: int
    ) -> None:
        known.reporting = False
        if epoch == known.worker.epoch and known.worker.is_up:
            known.load = load
            known.load_queue_s = load_queue_s
            while known.sent and known.sent[0][0] < taken_s:
                known.sent.popleft()
            self._refresh(known)
            self._on_news()
        if known.changed:
            self._report(known)

    def _refresh(self, known: _Known) -> None:
        self.roster.put(self._snapshot(known))

    def _snapshot(self, known: _Known) -> WorkerSnapshot:
        worker = known.worker
        load = known.load
        count = len(known.sent)
        sent = summed(prefill for _, prefill in known.sent)
        reported = self._scenario.rates
        sent_s = sent.seconds(beside_decode(reported, load.chunk_tokens, load.num_running))
        predicted_s = load.queue_s(reported) + sent_s
        is_decode = worker.role == "decode"
        prefill_at = self._scenario.prefill_at
        rates = known.rates
        if known.load_queue_s:
            rates = msgspec.structs.replace(rates, load_queue_s=known.load_queue_s)
        return WorkerSnapshot(
            worker_id=worker.worker_id,
            epoch=f"{worker.worker_id}/{worker.epoch}",
            address="",
            role=worker.role,
            state="draining" if worker.is_draining else "ready",
            reachable=worker.is_up,
            load=msgspec.structs.replace(
                load,
                num_running=max(load.num_running, known.num_staying),
                num_waiting=load.num_waiting + (count if is_decode else 0),
                queued_tokens=load.queued_tokens + sent.num_tokens,
                queued_s=predicted_s * self._paces.of(worker.worker_id),
                num_leases=load.num_leases + (0 if is_decode else count),
            ),
            keeps_deadlines=True,
            prefill_at="" if prefill_at == "auto" else prefill_at,
            decodes=not is_decode and prefill_at == "auto",
            rates=rates,
            pairs=self._pairs,
            prefill_share=self._shares.share(worker.worker_id),
        )
