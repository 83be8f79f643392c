"""What the simulated router knows of the workers: load that is old, what it sent since, their pace.

A worker's report is taken when its load changed and no other report is under way; it arrives
`report_age_s` later. What was sent to the worker after the report was taken is added to it. First
tokens are seen when they come: from them the workers' shares and real speed are learned.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.cost_model import PairRate, WorkerRates, prefill_seconds
from tandem.router.placement.choose import Roster, WorkerSnapshot
from tandem.router.placement.shares import Sent, Shares, paced
from tandem.simulator.clock import Clock
from tandem.simulator.scenario import Scenario
from tandem.simulator.workers.worker import Worker
from tandem.store.registry import Load


@dataclass(slots=True)
class _Known:
    worker: Worker
    load: Load
    rates: WorkerRates  # that it told, at the pace that was seen
    sent: deque[tuple[float, int]] = field(default_factory=deque)  # when, prompt tokens missing
    reporting: bool = False
    changed: bool = False


class View:
    """`roster` is kept up to date in place."""

    def __init__(self, scenario: Scenario, clock: Clock, workers: list[Worker]) -> None:
        self._scenario = scenario
        self._clock = clock
        self._known = {w.worker_id: _Known(w, w.load(), scenario.rates) for w in workers}
        self._shares = Shares()
        for worker in workers:
            self._shares.join(worker.worker_id, 0.0)
        self._pairs: dict[str, PairRate] = {w.worker_id: scenario.pair for w in workers}
        self.roster = Roster(self._snapshot(known) for known in self._known.values())

    def tick(self) -> None:
        """Before a choice: shares count for less as time goes by."""
        self.roster.second = self._shares.second(self._clock.now_s)

    def note_prefill(
        self, worker_id: str, num_tokens: int, missing: int, *, may_pull: bool
    ) -> Sent:
        """A prompt of which so many tokens are missing there was sent."""
        known, told = self._known[worker_id], self._scenario.rates
        prefill_s = prefill_seconds(told, num_tokens, num_tokens - missing)
        # Each of its steps gives a token to those who decode there.
        steps = missing / told.step_tokens
        beside_s = steps * told.decode.sequence_s * known.load.num_running
        now_s = self._clock.now_s
        sent = self._shares.sent(worker_id, prefill_s + beside_s, now_s, may_pull=may_pull)
        self.note_sent(worker_id, missing)
        return sent

    def note_sent(self, worker_id: str, missing: int) -> None:
        known = self._known[worker_id]
        known.sent.append((self._clock.now_s, missing))
        self._refresh(known)

    def note_first_token(self, sent: Sent, worker_id: str) -> None:
        self._shares.first_token(sent, worker_id, self._clock.now_s)
        known = self._known[worker_id]
        known.rates = paced(self._scenario.rates, self._shares.pace(worker_id))
        self._refresh(known)
        if sent.worker_id != worker_id:
            self._refresh(self._known[sent.worker_id])

    def note_state(self, worker: Worker) -> None:
        """The worker is up or down: seen at once, by its stream."""
        known = self._known[worker.worker_id]
        known.sent.clear()
        known.load, known.rates = worker.load(), self._scenario.rates
        self._shares.join(worker.worker_id, self.roster.mean_placed(worker.role))
        self._refresh(known)

    def note_drain(self, worker: Worker) -> None:
        """It takes nothing new: told at once, by its record."""
        self._refresh(self._known[worker.worker_id])

    def note_load(self, worker: Worker) -> None:
        known = self._known[worker.worker_id]
        known.changed = True
        if not known.reporting:
            self._report(known)

    def _report(self, known: _Known) -> None:
        known.reporting, known.changed = True, False
        load = known.worker.load()
        arrives = (known, load, self._clock.now_s, known.worker.generation)
        self._clock.after(self._scenario.report_age_s, self._take, *arrives)

    def _take(self, known: _Known, load: Load, taken_s: float, generation: int) -> None:
        known.reporting = False
        if generation == known.worker.generation and known.worker.is_up:
            known.load = load
            while known.sent and known.sent[0][0] < taken_s:
                known.sent.popleft()
            self._refresh(known)
        if known.changed:
            self._report(known)

    def _refresh(self, known: _Known) -> None:
        self.roster.put(self._snapshot(known))

    def _snapshot(self, known: _Known) -> WorkerSnapshot:
        worker, load, count = known.worker, known.load, len(known.sent)
        is_decode = worker.role == "decode"
        return WorkerSnapshot(
            worker_id=worker.worker_id,
            epoch=f"{worker.worker_id}/{worker.generation}",
            address="",
            role=worker.role,
            state="draining" if worker.is_draining else "ready",
            reachable=worker.is_up,
            num_running=load.num_running,
            num_waiting=load.num_waiting + (count if is_decode else 0),
            queued_tokens=load.queued_tokens + sum(tokens for _, tokens in known.sent),
            num_leases=load.num_leases + (0 if is_decode else count),
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            rates=known.rates,
            pairs=self._pairs,
            placed=self._shares.placed(worker.worker_id),
        )
