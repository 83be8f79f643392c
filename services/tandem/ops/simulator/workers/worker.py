"""A simulated worker: an engine, a KV cache and two queues of tasks.

A worker gets tasks, not requests. A task is the work of one worker for one request, and starts in
one of two ways:

- `submit`: this worker prefills the prompt, to decode it itself or for a peer. In the second case
  the task has no output tokens and is called a lease.
- `reserve`, then `adopt`: a peer prefills the prompt, and this worker pulls the blocks and decodes.

    state        meaning                                       next state
    submitted    waits for KV memory and for the engine        prefilling or loading
    loading      its blocks are loaded from tiers              prefilling
    prefilling   the engine computes the prompt's tokens       decoding; a lease: done
    reserving    waits for KV memory                           reserved
    reserved     has KV memory; a peer prefills the prompt     decoding, by `adopt`
    decoding     the engine generates tokens                   done

When a task is done, its blocks are released. The blocks of a lease are released by `release`, when
the peer has pulled them. Stored and evicted blocks are reported to the prefix index immediately.

A load from a tier does not need the engine, so it starts even while another prompt is prefilled.
For example, a prompt has 10 blocks, and a tier has blocks 2 to 7. The engine computes blocks 0 and
1 during the load, and blocks 8 and 9 after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.common.kv_tiers import PEER_SHARE_MAX
from tandem.common.perf_model.predict import (
    OWN_SPARE,
    RATES_OFF,
    beside_decode,
    prefill_seconds,
    queued_seconds,
)
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.perf_model.running_slots import STEP_SHARE, num_running_slots
from tandem.common.perf_model.soonest import LoadChoice, Offer, Producer, Prompt
from tandem.common.worker_load import WorkerLoad
from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.workers.engine import SimulatedEngine
from tandem.ops.simulator.workers.kv_cache import SimulatedKvCache
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.tiers import TierRead, WorkerTiers


class Listener(Protocol):
    """Receives the events of a worker's tasks. The worker calls the methods of the listener, which
    may call methods of the worker."""

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
    """One simulated worker: its tasks, engine, KV cache and tiers."""

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
        """`host` is the machine whose cores the worker shares. None: the worker has a core of its
        own."""
        self.worker_id = worker_id
        self.role = role
        self.rates = rates = scenario.true_rates(worker_id)
        self.is_up = True
        self.is_draining = False
        self.epoch = 0  # number of restarts so far
        self.num_leases = 0
        limits_s = (scenario.itl_target_s, STEP_SHARE * scenario.itl_limit_s)
        step_limit_s = min(filter(None, limits_s), default=0.0)
        self.engine: SimulatedEngine[Task] = SimulatedEngine(rates, step_limit_s)
        self._num_running_slots = num_running_slots(
            rates.decode, max_num_seqs=scenario.sequences_max, itl_limit_s=scenario.itl_limit_s
        )
        self._num_pulls = 0  # number of tasks that have reserved memory and wait for their KV
        self.cache = SimulatedKvCache(scenario.kv_tokens // scenario.block_size)
        self._scenario = scenario
        self._block_size = scenario.block_size
        self._clock = clock
        self._listener = listener
        self._queue: deque[Task] = deque()
        self._reserving: deque[Task] = deque()
        self._queued_tokens = 0
        self._num_loaded_for_peers = 0  # number of blocks that loads for peers fill
        self._wakes = 0
        self.tiers = tiers
        self._loads: dict[Task, TierRead] = {}  # task -> running load from tiers
        self._ready: deque[Task] = deque()  # tasks that have KV memory and wait for the engine
        self._host = host
        if host is not None:
            host.join(self)

    def submit(self, task: Task) -> bool:
        """Queues a task whose prompt this worker prefills. Returns False if the queue is full, if
        the task does not fit into the KV cache, or if the first token would be too late."""
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
        """Reserves KV memory for a task whose prompt a peer prefills. Returns False if the queue is
        full or the task does not fit into the KV cache."""
        if not self._fits(task) or len(self._reserving) >= self._scenario.queue_max:
            return False
        self._reserving.append(task)
        self._settle()
        return True

    def adopt(self, task: Task) -> None:
        """Starts to decode a task whose memory was reserved, after its blocks were pulled. The peer
        has generated the first token."""
        self._end_pull(task)
        self._store(task)
        self.engine.advance(self._clock.now_s)
        self.engine.decode(task, task.output_tokens - 1)
        self._settle()

    def release(self, task: Task) -> None:
        """Releases the blocks of a task: of a lease after the peer has pulled the blocks, or of a
        task that had reserved memory and no longer needs it."""
        if not self.is_up or task.epoch != self.epoch:
            return
        self._end_pull(task)
        self.cache.release(task.hashes[: task.num_held], task.num_private)
        task.num_held = task.num_private = 0
        self.num_leases -= task.output_tokens == 0
        self._settle()

    def cancel(self, task: Task) -> None:
        """Cancels a task in any state. Does nothing if the task is done."""
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
        """Simulates the death of the worker, which loses its tasks and its KV cache. Returns the
        lost tasks."""
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
        self._queued_tokens = self.num_leases = self._num_loaded_for_peers = self._num_pulls = 0
        self.is_up = self.is_draining = False
        self._plan()
        return tasks

    def restart(self) -> None:
        """Restarts the worker with an empty KV cache. The disk tier keeps its blocks."""
        self.is_up = True
        self.epoch += 1
        if self.tiers is not None:
            self.tiers.restart()
        self.engine.advance(self._clock.now_s)
        self._listener.load_changed(self)

    def set_speed(self, speed: float) -> None:
        """Sets the speed of the engine. 1 is full speed. The speed is lower if other workers use
        the same cores."""
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
            queued_s=queued_seconds(self._beside(self._scenario.rates), self._missing_spans()),
            num_leases=self.num_leases,
            blocks_total=self.cache.num_blocks,
            blocks_used=self.cache.num_used,
            # Without a limit, slots hardly matter, because there are many.
            num_pulls=self._num_pulls if self._scenario.itl_limit_s else 0,
            num_running_slots=self._num_running_slots if self._scenario.itl_limit_s else 0,
            chunk_tokens=self.engine.chunk_tokens if self.engine.step_limit_s else 0,
        )

    def _is_late_in_queue(self, task: Task) -> bool:
        if task.first_token_by == math.inf:
            return False
        ahead_s = queued_seconds(self._beside(self.rates), self._missing_spans())
        expected_s = (ahead_s + self._own_s(task)) / RATES_OFF
        return ahead_s > 0 and self._clock.now_s + expected_s > task.first_token_by

    def _refuse_late(self) -> None:
        """Refuses the queued tasks whose first token would be too late even if they started now."""
        now_s = self._clock.now_s
        waiting = [t for t in self._queue if t.has_waited and t.first_token_by < math.inf]
        for task in waiting:
            is_late = now_s + OWN_SPARE * self._own_s(task) > task.first_token_by
            # The call of `refused` for an earlier task may have removed this task from the queue.
            if is_late and task in self._queue:
                self._drop_load(task)
                self._queue.remove(task)
                self._set_queued(task, 0)
                self.num_leases -= task.output_tokens == 0
                self._listener.refused(self, task)

    def _own_s(self, task: Task) -> float:
        cached = max(self.cache.num_cached(task.hashes), task.pulled_blocks) * self._block_size
        return prefill_seconds(self._beside(self.rates), task.num_tokens, cached)

    def _beside(self, rates: WorkerRates) -> WorkerRates:
        """Returns rates with the time of the sequences that decode now. Without a step limit, these
        sequences hardly matter."""
        engine = self.engine
        if not engine.step_limit_s:
            return rates
        return beside_decode(rates, engine.chunk_tokens, engine.num_decoding)

    def _missing_spans(self) -> Iterator[tuple[int, int]]:
        """Yields a pair for each unfinished prompt: the number of tokens to compute, and the number
        of tokens before them in the prompt."""
        for task in (*self._queue, *self._loads, *self._ready):
            if (missing := task.queued_tokens) > 0:
                yield missing, task.num_tokens - missing
        if left := self.engine.prefill_tokens_left():
            yield left, self.engine.prefill_context()

    @property
    def is_idle(self) -> bool:
        """True if the worker has no tasks, and no task uses its blocks."""
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
        if task.load is not None and task.needs_first_blocks:
            self._cache_blocks(task, task.load.first)
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
        self._cache_blocks(task, len(task.hashes))
        if self.tiers is not None:
            self.tiers.use(task.hashes, keep=task.returns)
            self.tiers.write(task.hashes, task.new_hashes)
            self._report_tier_events()

    def _cache_blocks(self, task: Task, end: int) -> None:
        """Adds the task's blocks up to index `end` (excluded) to the KV cache, and reports them to
        the listener."""
        hashes = task.hashes[task.num_held : end]
        stored = self.cache.store(hashes)
        task.num_private -= len(hashes)
        task.num_held += len(hashes)
        if stored:
            self._listener.blocks_changed(self, stored, ())
            if self.tiers is not None:
                task.new_hashes += stored

    def _report_tier_events(self) -> None:
        assert self.tiers is not None
        for tier, stored, removed in (
            (event.tier, [block.block_hash for block in event.stored], event.removed)
            for event in self.tiers.take_events()
        ):
            self._listener.blocks_changed(self, stored, removed, tier)

    def _settle(self) -> None:
        """Starts all tasks that can start, plans the next event of the engine, and reports the
        changed load."""
        engine = self.engine
        engine.advance(self._clock.now_s)
        while self._reserving and self._has_slot() and self._hold(self._reserving[0]):
            task = self._reserving.popleft()
            task.is_reserved = True
            self._num_pulls += 1
            self._listener.reserved(self, task)
        if engine.prefilling is None:
            self._refuse_late()
        while self._start_next():
            pass
        for task in self._queue:
            task.has_waited = True
        self._plan()
        self._listener.load_changed(self)

    def _start_next(self) -> bool:
        """Starts the prefill or the load of one task. Returns False if no task can start."""
        engine = self.engine
        tiers = self.tiers
        is_free = engine.prefilling is None
        if self._ready and is_free:
            self._compute(self._ready.popleft())
            return True
        task = self._next_waiting()
        if task is None or (task.output_tokens and not self._has_slot()):
            return False
        if not is_free and (tiers is None or task.is_compute_chosen):
            return False
        choice = self.plan_load(task)
        task.is_compute_chosen = choice is None
        if (choice is None and not is_free) or not self._hold(task):
            return False
        self._queue.remove(task)
        if choice is not None:
            self._begin_load(task, choice)
            return True
        if tiers is not None and tiers.has_more(
            task.reusable_hashes(self._block_size), task.num_available
        ):
            tiers.decline()
        self._compute(task)
        return True

    def _has_slot(self) -> bool:
        """Returns whether one more sequence may run."""
        num_live = self.engine.num_decoding + self._num_loading() + self._num_pulls
        return num_live < self._num_running_slots

    def _end_pull(self, task: Task) -> None:
        self._num_pulls -= task.is_reserved
        task.is_reserved = False

    def _next_waiting(self) -> Task | None:
        """Returns the oldest queued task. A task is skipped while its first missing block is being
        loaded for another task, because after that load the block is not missing any more."""
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
        """Starts the prefill of the task's missing tokens. If tokens are missing before the blocks
        that are being loaded, only these tokens are computed now."""
        size = self._block_size
        end = task.num_tokens
        if task.load is not None and task.needs_first_blocks:
            end = task.load.first * size
        start = min(task.num_available * size, end - 1)
        self._set_queued(task, task.queued_tokens - (end - start) if task.needs_first_blocks else 0)
        self.engine.prefill(task, end - start, start)

    def _set_queued(self, task: Task, num_tokens: int) -> None:
        self._queued_tokens += num_tokens - task.queued_tokens
        task.queued_tokens = num_tokens

    def plan_load(
        self, task: Task, *, offer: Offer | None = None, producer: Producer | None = None
    ) -> LoadChoice | None:
        """Returns the range of a prompt's blocks that the worker would load from tiers now, or None
        if another way is faster. `offer` is a peer from which blocks can be pulled, and `producer`
        a peer that could prefill the prompt."""
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
        self._report_tier_events()
        return choice

    def load_for_peer(self, block_hashes: Sequence[bytes]) -> tuple[float, int] | None:
        """Starts to load blocks from tiers into the KV cache, so that a peer can pull them. Returns
        the seconds until they are there, and how many leading blocks the peer can then pull. These
        are fewer if too much of the KV cache is in use (engine/peer_blocks.py). Returns None if the
        worker does not load any, because the tiers or the KV cache have changed."""
        if self.tiers is None:
            return None
        cached = self.cache.num_cached(block_hashes)
        share = int(PEER_SHARE_MAX * self.cache.num_blocks) - self._num_loaded_for_peers
        room = min(share, self.cache.room(block_hashes[:cached]))
        block_hashes = block_hashes[: cached + max(0, room)]
        num_missing = len(block_hashes) - cached
        if not num_missing:
            return (0.0, cached) if cached else None
        load = self.tiers.load_for_peer(block_hashes, cached, self._clock.now_s)
        removed = None
        if load is not None:
            removed = self.cache.reserve(block_hashes[:cached], num_missing)
            if removed is None:
                self.tiers.release_load(load)
        self._report_tier_events()
        if load is None or removed is None:
            return None
        if removed:
            self._listener.blocks_changed(self, (), removed)
        self._num_loaded_for_peers += num_missing
        self._clock.at(load.ends_s, self._end_peer_load, block_hashes, cached, load, self.epoch)
        return load.ends_s - self._clock.now_s, len(block_hashes)

    def _end_peer_load(
        self, block_hashes: Sequence[bytes], cached: int, load: TierRead, epoch: int
    ) -> None:
        assert self.tiers is not None
        self.tiers.end_load(load)
        if not self.is_up or epoch != self.epoch:
            return
        self._num_loaded_for_peers -= len(block_hashes) - cached
        stored = self.cache.store(block_hashes[cached:])
        if stored:
            self._listener.blocks_changed(self, stored, ())
        self.cache.release(block_hashes, 0)
        self._settle()

    def _begin_load(self, task: Task, choice: LoadChoice) -> None:
        assert self.tiers is not None
        load = self.tiers.begin_load(task.hashes, choice, self._clock.now_s)
        task.load = self._loads[task] = load
        num_known = task.num_available + load.end - load.first
        self._set_queued(task, task.num_tokens - num_known * self._block_size)
        self._clock.at(load.ends_s, self._end_load, task, load)
        if task.needs_first_blocks:
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
        """Queues a task for the engine, if its load from tiers has ended and all blocks before the
        loaded ones are computed."""
        assert task.load is not None
        if task.load.is_done and not task.needs_first_blocks:
            self._cache_blocks(task, task.load.end)
            self._ready.append(task)

    def _drop_load(self, task: Task) -> None:
        load = self._loads.pop(task, None)
        if load is not None and self.tiers is not None:
            self.tiers.release_load(load)
        if task in self._ready:
            self._ready.remove(task)
        if task.load is not None:
            self._set_queued(task, 0)

    def _num_loading(self) -> int:
        """Returns the number of tasks that have KV memory and wait for a load or for the engine."""
        return len({*self._loads, *self._ready} - {self.engine.prefilling})

    def _plan(self) -> None:
        """Plans the next event of the engine, and reports to the host whether the worker is
        computing."""
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
    """A machine whose workers share its cores. A worker has one thread.

    `cores` is the throughput of all workers together, in units of the throughput of one worker that
    runs alone. `cores` need not be an integer, because workers also share the memory bandwidth.
    With cores = 3 and 4 busy workers, each worker runs at 3/4 of its speed.
    """

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._is_busy: dict[SimulatedWorker, bool] = {}
        self._speed = 1.0

    def join(self, worker: SimulatedWorker) -> None:
        self._is_busy[worker] = False

    def note(self, worker: SimulatedWorker, *, busy: bool) -> None:
        """Records whether a worker is computing, and sets the speed of all workers on this
        machine."""
        self._is_busy[worker] = busy
        speed = min(1.0, self._cores / max(1, sum(self._is_busy.values())))
        if speed != self._speed:
            self._speed = speed
            for each in self._is_busy:
                each.set_speed(speed)
