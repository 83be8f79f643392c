"""A simulated worker: an engine, a KV cache and two queues. It knows tasks, not requests.

    submitted   --memory and the engine are free--> prefilling --> prefilled [--> decoding --> over]
                --a tier has more of it--> loading --> prefilling, as soon as the engine is free
    reserving   --memory is free--> reserved --adopted: its blocks were pulled--> decoding --> over

A task is either computed here (`submit`), for itself or for a peer (a lease: no tokens to make), or
comes with its prompt's blocks (`reserve`, then `adopt`). Blocks are held until the task is over or
`release`d. Blocks that are stored and evicted go to the prefix index as events, at once.

Loads need no engine: they begin while another prompt is prefilled. A task that computes its first
blocks while the others are loaded has the engine twice: until `load.first`, and after the load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.common.perf_model.predict import OWN_SPARE, RATES_OFF, prefill_seconds, queued_seconds
from tandem.common.perf_model.soonest import LoadChoice, Offer, Producer, Prompt
from tandem.common.worker_load import WorkerLoad
from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.workers.engine import SimulatedEngine
from tandem.ops.simulator.workers.kv_cache import SimulatedKvCache
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.tiers import TierRead, WorkerTiers


class Listener(Protocol):
    """Follows the tasks. It is called inside a worker's event, and may call the worker back."""

    def reserved(self, worker: SimulatedWorker, task: Task) -> None: ...
    def prefilled(self, worker: SimulatedWorker, task: Task) -> None: ...
    def refused(self, worker: SimulatedWorker, task: Task) -> None: ...
    def decoded(self, worker: SimulatedWorker, task: Task) -> None: ...
    def blocks_changed(
        self,
        worker: SimulatedWorker,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: str = "",
    ) -> None: ...
    def load_changed(self, worker: SimulatedWorker) -> None: ...


class SimulatedWorker:
    def __init__(
        self,
        worker_id: str,
        role: str,
        scenario: Scenario,
        clock: Clock,
        listener: Listener,
        host: SharedCores | None = None,
        tiers: WorkerTiers | None = None,
    ) -> None:
        """Without a `host` it has cores of its own."""
        self.worker_id = worker_id
        self.role = role
        self.rates = rates = scenario.true_rates(worker_id)
        self.is_up = True
        self.is_draining = False
        self.epoch = 0  # counts its starts
        self.num_leases = 0
        self.engine: SimulatedEngine[Task] = SimulatedEngine(rates)
        self.cache = SimulatedKvCache(scenario.kv_tokens // scenario.block_size)
        self._scenario = scenario
        self._block_size = scenario.block_size
        self._clock = clock
        self._listener = listener
        self._queue: deque[Task] = deque()
        self._reserving: deque[Task] = deque()
        self._queued_tokens = 0
        self._wakes = 0
        self.tiers = tiers
        self._loads: dict[Task, TierRead] = {}  # under way
        self._ready: deque[Task] = deque()  # have their memory, and wait for the engine
        self._host = host
        if host is not None:
            host.join(self)

    def submit(self, task: Task) -> bool:
        """Queues a task for prefill. False if the queue is full, memory could never hold it, or its
        first token would come too late."""
        if not self._fits(task) or len(self._queue) >= self._scenario.queue_max:
            return False
        if self._is_late_in_queue(task):
            return False
        cached = self.cache.num_cached(task.hashes)
        task.queued_tokens = task.num_tokens - max(cached, task.pulled_blocks) * self._block_size
        self._queued_tokens += task.queued_tokens
        self._queue.append(task)
        self.num_leases += task.output_tokens == 0
        self._settle()
        return True

    def reserve(self, task: Task) -> bool:
        """Reserves memory for a task that a peer prefills. False as for `submit`."""
        if not self._fits(task) or len(self._reserving) >= self._scenario.queue_max:
            return False
        self._reserving.append(task)
        self._settle()
        return True

    def adopt(self, task: Task) -> None:
        """Decodes a reserved task whose blocks all came; the peer made its first token."""
        self._store(task)
        self.engine.advance(self._clock.now_s)
        self.engine.decode(task, task.output_tokens - 1)
        self._settle()

    def release(self, task: Task) -> None:
        """Releases a lease whose blocks were read, or a reserved task that is given up."""
        if not self.is_up or task.epoch != self.epoch:
            return
        self.cache.release(task.hashes[: task.num_held], task.num_private)
        task.num_held = task.num_private = 0
        self.num_leases -= task.output_tokens == 0
        self._settle()

    def cancel(self, task: Task) -> None:
        """Cancels a task, wherever it is; does nothing when it is over."""
        self._drop_load(task)
        if task in self._queue:
            self._queue.remove(task)
            self._set_queued(task, 0)
            self.num_leases -= task.output_tokens == 0
        elif self.engine.prefilling is task:
            self.engine.advance(self._clock.now_s)
            self.engine.stop_prefill()
            self.release(task)
        elif task.num_held or task.num_private:
            self.release(task)

    def fail(self) -> list[Task]:
        """Dies and loses everything; returns the tasks that were in the queues or in the engine."""
        self.engine.advance(self._clock.now_s)
        for task, tokens_left in self.engine.tokens_left():
            task.tokens_left = tokens_left
        tasks = [*self._queue, *self._reserving, *self._loads, *self._ready]
        tasks = list(dict.fromkeys((*tasks, *self.engine.drop_all())))
        for task in tasks:
            self._drop_load(task)
        self._queue.clear()
        self._reserving.clear()
        self.cache = SimulatedKvCache(self.cache.num_blocks)
        self._queued_tokens = self.num_leases = 0
        self.is_up = self.is_draining = False
        self._plan()
        return tasks

    def restart(self) -> None:
        """Comes back empty, but for its disk."""
        self.is_up = True
        self.epoch += 1
        if self.tiers is not None:
            self.tiers.restart()
        self.engine.advance(self._clock.now_s)
        self._listener.load_changed(self)

    def set_speed(self, speed: float) -> None:
        """Sets the speed of its engine, by what else computes on its host."""
        self.engine.advance(self._clock.now_s)
        self.engine.speed = speed
        self._plan_wake()

    def load(self) -> WorkerLoad:
        self.engine.advance(self._clock.now_s)
        task = self.engine.prefilling
        prefills_for_itself = task is not None and task.output_tokens > 0
        return WorkerLoad(
            num_running=self.engine.num_decoding + prefills_for_itself,
            num_waiting=len(self._queue) + len(self._reserving) + self._num_loading(),
            queued_tokens=self._queued_tokens + self.engine.prefill_tokens_left(),
            queued_s=queued_seconds(self._scenario.rates, self._missing_spans()),
            num_leases=self.num_leases,
            blocks_total=self.cache.num_blocks,
            blocks_used=self.cache.num_used,
        )

    def _is_late_in_queue(self, task: Task) -> bool:
        if task.first_token_by == math.inf:
            return False
        ahead_s = queued_seconds(self.rates, self._missing_spans())
        expected_s = (ahead_s + self._own_s(task)) / RATES_OFF
        return ahead_s > 0 and self._clock.now_s + expected_s > task.first_token_by

    def _refuse_late(self) -> None:
        """Refuses queued tasks whose first token would come too late if they began now."""
        now_s = self._clock.now_s
        waiting = [t for t in self._queue if t.has_waited and t.first_token_by < math.inf]
        for task in waiting:
            is_late = now_s + OWN_SPARE * self._own_s(task) > task.first_token_by
            if is_late and task in self._queue:  # the listener may call back
                self._drop_load(task)
                self._queue.remove(task)
                self._set_queued(task, 0)
                self.num_leases -= task.output_tokens == 0
                self._listener.refused(self, task)

    def _own_s(self, task: Task) -> float:
        cached = max(self.cache.num_cached(task.hashes), task.pulled_blocks) * self._block_size
        return prefill_seconds(self.rates, task.num_tokens, cached)

    def _missing_spans(self) -> Iterator[tuple[int, int]]:
        """Yields the tokens of each prompt that are still to be computed, and those before them."""
        for task in (*self._queue, *self._loads, *self._ready):
            if (missing := task.queued_tokens) > 0:
                yield missing, task.num_tokens - missing
        if left := self.engine.prefill_tokens_left():
            yield left, self.engine.prefill_context()

    @property
    def is_idle(self) -> bool:
        """True if nothing is held here, and nothing waits."""
        engine = self.engine
        waits = self._queue or self._reserving or engine.prefilling is not None or self._loads
        return not (waits or engine.num_decoding or self.num_leases or self.cache.num_used)

    def _fits(self, task: Task) -> bool:
        return self._blocks(task) <= self.cache.num_blocks

    def _blocks(self, task: Task) -> int:
        return -(-(task.num_tokens + task.output_tokens) // self._block_size)

    def _wake(self, number: int) -> None:
        if number != self._wakes:
            return
        engine = self.engine
        engine.advance(self._clock.now_s)
        task = engine.take_prefilled()
        if task is not None:
            self._finish_prefill(task)
        for task in engine.take_decoded():
            self._finish_decode(task)
        self._settle()

    def _finish_prefill(self, task: Task) -> None:
        if task.load is not None and task.lacks_first:
            self._name(task, task.load.first)
            self._resume(task)
            return
        self._store(task)
        if task.output_tokens > 1:
            self.engine.decode(task, task.output_tokens - 1)
        self._listener.prefilled(self, task)
        if task.output_tokens == 1:
            self._finish_decode(task)

    def _finish_decode(self, task: Task) -> None:
        self.cache.release(task.hashes[: task.num_held], task.num_private)
        self._listener.decoded(self, task)

    def _store(self, task: Task) -> None:
        self._name(task, len(task.hashes))
        if self.tiers is not None:
            self.tiers.use(task.hashes, keep=task.returns)
            self.tiers.write(task.hashes, task.new_hashes)
            self._tell_tiers()

    def _name(self, task: Task, end: int) -> None:
        """Lets the blocks before `end` be found."""
        hashes = task.hashes[task.num_held : end]
        stored = self.cache.store(hashes)
        task.num_private -= len(hashes)
        task.num_held += len(hashes)
        if stored:
            self._listener.blocks_changed(self, stored, ())
            if self.tiers is not None:
                task.new_hashes += stored

    def _tell_tiers(self) -> None:
        assert self.tiers is not None
        for tier, stored, removed in (
            (event.tier, [block.block_hash for block in event.stored], event.removed)
            for event in self.tiers.take_events()
        ):
            self._listener.blocks_changed(self, stored, removed, tier)

    def _settle(self) -> None:
        """Starts what can start, plans the next event, tells that the load changed."""
        engine = self.engine
        engine.advance(self._clock.now_s)
        while self._reserving and self._hold(self._reserving[0]):
            self._listener.reserved(self, self._reserving.popleft())
        if engine.prefilling is None:
            self._refuse_late()
        while self._start_next():
            pass
        for task in self._queue:
            task.has_waited = True
        self._plan()
        self._listener.load_changed(self)

    def _start_next(self) -> bool:
        """Starts a prompt's prefill or its load; returns False if none can start."""
        engine = self.engine
        tiers = self.tiers
        is_free = engine.prefilling is None
        if self._ready and is_free:
            self._compute(self._ready.popleft())
            return True
        task = self._next_waiting()
        num_live = engine.num_decoding + self._num_loading()
        if task is None or num_live >= self._scenario.sequences_max:
            return False
        if not is_free and (tiers is None or task.is_weighed):
            return False
        choice = self.plan_load(task)
        task.is_weighed = choice is None
        if (choice is None and not is_free) or not self._hold(task):
            return False
        self._queue.remove(task)
        if choice is not None:
            self._begin_load(task, choice)
            return True
        if tiers is not None and tiers.has_more(
            task.reusable_hashes(self._block_size), task.num_there
        ):
            tiers.decline()
        self._compute(task)
        return True

    def _next_waiting(self) -> Task | None:
        """Returns the oldest task whose next block is not being loaded for another."""
        return next((task for task in self._queue if not self._is_awaited(task)), None)

    def _is_awaited(self, task: Task) -> bool:
        if not self._loads:
            return False
        at = self.cache.num_cached(task.hashes)
        return at < len(task.hashes) and any(
            at < load.end and other.hashes[at] == task.hashes[at]
            for other, load in self._loads.items()
        )

    def _compute(self, task: Task) -> None:
        """Has the engine compute what is missing, or first what comes before loaded blocks."""
        size = self._block_size
        end = task.num_tokens
        if task.load is not None and task.lacks_first:
            end = task.load.first * size
        start = min(task.num_there * size, end - 1)
        self._set_queued(task, task.queued_tokens - (end - start) if task.lacks_first else 0)
        self.engine.prefill(task, end - start, start)

    def _set_queued(self, task: Task, num_tokens: int) -> None:
        self._queued_tokens += num_tokens - task.queued_tokens
        task.queued_tokens = num_tokens

    def plan_load(
        self, task: Task, *, offer: Offer | None = None, producer: Producer | None = None
    ) -> LoadChoice | None:
        """Returns what the worker would load of a prompt now, if that is the soonest."""
        if self.tiers is None:
            return None
        engine = self.engine
        rates = self.rates
        engine.advance(self._clock.now_s)
        hashes = task.reusable_hashes(self._block_size)
        queue_s = rates.prefill.seconds(engine.prefill_tokens_left(), 0, rates.step_tokens)
        prompt = Prompt(
            task.num_tokens,
            self._block_size,
            max(self.cache.num_cached(hashes), task.pulled_blocks),
            rates.prefill,
            rates.step_tokens,
            queue_s,
            engine.num_decoding + max(0, len(self._queue) - 1),
        )
        choice = self.tiers.plan(prompt, hashes, self._clock.now_s, offer=offer, producer=producer)
        self._tell_tiers()
        return choice

    def _begin_load(self, task: Task, choice: LoadChoice) -> None:
        assert self.tiers is not None
        load = self.tiers.begin_load(task.hashes, choice, self._clock.now_s)
        task.load = self._loads[task] = load
        num_known = task.num_there + load.end - load.first
        self._set_queued(task, task.num_tokens - num_known * self._block_size)
        self._clock.at(load.ends_s, self._end_load, task, load)
        if task.lacks_first:
            self._ready.append(task)

    def _end_load(self, task: Task, load: TierRead) -> None:
        if self._loads.get(task) is not load:
            return
        assert self.tiers is not None
        del self._loads[task]
        task.loaded_blocks = self.tiers.end_load(load)
        load.is_done = True
        self._resume(task)
        self._settle()

    def _resume(self, task: Task) -> None:
        """Goes on with a task once its load has ended and all before that is computed."""
        assert task.load is not None
        if task.load.is_done and not task.lacks_first:
            self._name(task, task.load.end)
            self._ready.append(task)

    def _drop_load(self, task: Task) -> None:
        load = self._loads.pop(task, None)
        if load is not None and self.tiers is not None:
            self.tiers.give_up(load)
        if task in self._ready:
            self._ready.remove(task)
        if task.load is not None:
            self._set_queued(task, 0)

    def _num_loading(self) -> int:
        """Returns how many tasks have memory and are neither in the engine nor over."""
        return len({*self._loads, *self._ready} - {self.engine.prefilling})

    def _plan(self) -> None:
        """Plans the next event, and tells the host whether the worker computes at all now."""
        busy = self._plan_wake()
        if self._host is not None:
            self._host.note(self, busy=busy)

    def _plan_wake(self) -> bool:
        self._wakes += 1
        next_at = self.engine.next_at()
        if next_at is None:
            return False
        self._clock.at(next_at, self._wake, self._wakes)
        return True

    def _hold(self, task: Task) -> bool:
        cached = self.cache.num_cached(task.hashes)
        num_private = self._blocks(task) - cached
        removed = self.cache.reserve(task.hashes[:cached], num_private)
        if removed is None:
            return False
        task.num_held = cached
        task.num_private = num_private
        task.epoch = self.epoch
        task.cached_tokens = min(cached * self._block_size, task.num_tokens - 1)
        if removed:
            self._listener.blocks_changed(self, (), removed)
        return True


class SharedCores:
    """A machine whose workers share its cores: when more are busy than it has, each is slower.

    A worker has one thread. `cores` need not be whole: it is by how much all workers together are
    faster than one alone, memory and everything else that they share counted in.
    """

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._is_busy: dict[SimulatedWorker, bool] = {}
        self._speed = 1.0

    def join(self, worker: SimulatedWorker) -> None:
        self._is_busy[worker] = False

    def note(self, worker: SimulatedWorker, *, busy: bool) -> None:
        """Notes whether a worker computes now; slows all when more do than there are cores."""
        self._is_busy[worker] = busy
        speed = min(1.0, self._cores / max(1, sum(self._is_busy.values())))
        if speed != self._speed:
            self._speed = speed
            for each in self._is_busy:
                each.set_speed(speed)
