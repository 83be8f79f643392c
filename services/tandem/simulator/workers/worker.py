"""A simulated worker: an engine, a KV cache and two queues. It knows tasks, not requests.

    submitted   --memory and the engine are free--> prefilling --> prefilled [--> decoding --> over]
    reserving   --memory is free--> reserved --adopted: its blocks were pulled--> decoding --> over

A task is either computed here (`submit`), for itself or for a peer (a lease: no tokens to make), or
comes with its prompt's blocks (`reserve`, then `adopt`). Blocks are held until the task is over or
`release`d. Blocks that are stored and evicted go to the prefix index as events, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.simulator.clock import Clock
from tandem.simulator.scenario import Scenario
from tandem.simulator.workers.engine import Engine
from tandem.simulator.workers.host import Host
from tandem.simulator.workers.kv_cache import KvCache
from tandem.store.registry import Load


@dataclass(slots=True, eq=False)
class Task:
    """Part of a request on one worker."""

    owner: object
    num_tokens: int
    hashes: Sequence[bytes]  # of the prompt's full blocks
    output_tokens: int  # 0: a lease
    cached_tokens: int = 0  # that were here when it started
    queued_tokens: int = 0  # it counts as so many while it waits
    pulled_blocks: int = 0  # leading blocks that came from a holder before it was submitted
    num_held: int = 0  # leading blocks of `hashes` that it holds by name
    num_private: int = 0
    epoch: int = 0  # of the worker when it got its blocks
    tokens_left: int | None = None  # to make, when its worker died under it in the batch


class Listener(Protocol):
    """Follows the tasks. It is called inside a worker's event, and may call the worker back."""

    def reserved(self, worker: Worker, task: Task) -> None: ...
    def prefilled(self, worker: Worker, task: Task) -> None: ...
    def decoded(self, worker: Worker, task: Task) -> None: ...
    def blocks_changed(
        self, worker: Worker, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None: ...
    def load_changed(self, worker: Worker) -> None: ...


class Worker:
    def __init__(
        self,
        worker_id: str,
        role: str,
        scenario: Scenario,
        clock: Clock,
        listener: Listener,
        host: Host | None = None,
    ) -> None:
        """Without a `host` it has cores of its own."""
        self.worker_id = worker_id
        self.role = role
        self.rates = rates = scenario.true_rates(worker_id)
        self.is_up = True
        self.is_draining = False
        self.epoch = 0  # counts its starts
        self.num_leases = 0
        self.engine: Engine[Task] = Engine(rates)
        self.cache = KvCache(scenario.kv_tokens // scenario.block_size)
        self._scenario = scenario
        self._block_size = scenario.block_size
        self._clock = clock
        self._listener = listener
        self._queue: deque[Task] = deque()
        self._reserving: deque[Task] = deque()
        self._queued_tokens = 0
        self._wakes = 0
        self._host = host
        if host is not None:
            host.join(self)

    def submit(self, task: Task) -> bool:
        """Queues a task for prefill. False if the queue is full, or memory could never hold it."""
        if not self._fits(task) or len(self._queue) >= self._scenario.queue_max:
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
        if task in self._queue:
            self._queue.remove(task)
            self._queued_tokens -= task.queued_tokens
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
        tasks = [*self._queue, *self._reserving, *self.engine.drop_all()]
        self._queue.clear()
        self._reserving.clear()
        self.cache = KvCache(self.cache.num_blocks)
        self._queued_tokens = self.num_leases = 0
        self.is_up = self.is_draining = False
        self._plan()
        return tasks

    def restart(self) -> None:
        """Comes back empty."""
        self.is_up = True
        self.epoch += 1
        self.engine.advance(self._clock.now_s)
        self._listener.load_changed(self)

    def set_speed(self, speed: float) -> None:
        """Sets the speed of its engine, by what else computes on its host."""
        self.engine.advance(self._clock.now_s)
        self.engine.speed = speed
        self._plan_wake()

    def load(self) -> Load:
        self.engine.advance(self._clock.now_s)
        task = self.engine.prefilling
        prefills_for_itself = task is not None and task.output_tokens > 0
        return Load(
            num_running=self.engine.num_decoding + prefills_for_itself,
            num_waiting=len(self._queue) + len(self._reserving),
            queued_tokens=self._queued_tokens + self.engine.prefill_tokens_left(),
            num_leases=self.num_leases,
            blocks_total=self.cache.num_blocks,
            blocks_used=self.cache.num_used,
        )

    @property
    def is_idle(self) -> bool:
        """True if nothing is held here, and nothing waits."""
        engine = self.engine
        waits = self._queue or self._reserving or engine.prefilling is not None
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
        hashes = task.hashes[task.num_held :]
        stored = self.cache.store(hashes)
        task.num_private -= len(hashes)
        task.num_held = len(task.hashes)
        if stored:
            self._listener.blocks_changed(self, stored, ())

    def _settle(self) -> None:
        """Starts what can start, plans the next event, tells that the load changed."""
        engine = self.engine
        engine.advance(self._clock.now_s)
        while self._reserving and self._hold(self._reserving[0]):
            self._listener.reserved(self, self._reserving.popleft())
        has_room = engine.num_decoding < self._scenario.sequences_max
        if self._queue and engine.prefilling is None and has_room:
            task = self._queue[0]
            if self._hold(task):
                self._queue.popleft()
                self._queued_tokens -= task.queued_tokens
                known = max(task.num_held, task.pulled_blocks) * self._block_size
                start = min(known, task.num_tokens - 1)
                engine.prefill(task, task.num_tokens - start, start)
        self._plan()
        self._listener.load_changed(self)

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
        task.num_held, task.num_private = cached, num_private
        task.epoch = self.epoch
        task.cached_tokens = min(cached * self._block_size, task.num_tokens - 1)
        if removed:
            self._listener.blocks_changed(self, (), removed)
        return True
