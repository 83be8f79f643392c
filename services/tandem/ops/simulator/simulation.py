"""Simulates one run of a trace: placement, prefix index and workers.

When a request arrives, the simulation looks up its prompt in the prefix index, chooses workers, and
submits the request to the chosen decode worker. If the trace has tenants or priorities, the request
first waits for its turn at workers with capacity. If the worker refuses the request, the simulation
chooses again among the others. Then one of two things happens:

  The decode worker prefills the prompt itself:
    prefilled --> decoded --> served

  A prefill worker prefills the prompt and decodes the request itself: the same.

  A prefill worker prefills the prompt for the decode worker:
    the decode worker reserves KV memory --> the prefill worker gets a lease (a task without output)
    --> prefilled --> the decode worker pulls the blocks --> decoded --> served

If the decode worker dies, the request migrates: it is placed again, with the tokens generated so
far. If this happens after MIGRATIONS_MAX migrations, the request is lost. If the prefill worker
dies, the next candidate or the decode worker prefills the prompt.
"""

import math
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.policies import Policy
from tandem.ops.simulator.prefill_ways import expect_pull, exposed_pull_s, peers_to_ask
from tandem.ops.simulator.requests import MIGRATIONS_MAX, Request
from tandem.ops.simulator.scenario import Fault, Scenario
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.view import View
from tandem.ops.simulator.workers.make_tiers import make_tiers
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.worker import SharedCores, SimulatedWorker
from tandem.prefix_index.holders import holder_of, with_shared_tiers
from tandem.prefix_index.memory import MemoryIndex
from tandem.router.admission.admit import admit
from tandem.router.admission.calibration import Calibration
from tandem.router.admission.capacity import (
    COMPLETION_TOKENS_LIKELY,
    has_capacity,
    queued_max_s,
    work_s,
)
from tandem.router.admission.turns import Claim, Turns
from tandem.router.autoscaler.demand import DemandMeter
from tandem.router.placement.choose import Placement, Work

T = TypeVar("T")
WAITING_MAX = 256  # the default of `hold_requests_max` of routers


class Simulation:
    """The simulation of one trace under one placement policy. `run` may be called once."""

    def __init__(self, scenario: Scenario, arrivals: Sequence[Arrival], policy: Policy) -> None:
        self.scenario = scenario
        self.requests: list[Request] = []
        self._arrivals = arrivals
        self._policy = policy
        self._rng = Random(scenario.seed)
        self.clock = Clock()
        self._index = MemoryIndex()
        # Holder of blocks (a worker's KV pool, or a tier of a worker) -> serial number of the next
        # event that the holder sends to the prefix index.
        self._logs: dict[str, int] = {}
        host = SharedCores(scenario.cores) if scenario.cores else None
        self._has_tiers = bool(scenario.rates.tiers)
        tiers = make_tiers(scenario, arrivals) if self._has_tiers else {}
        self.workers = {
            worker_id: SimulatedWorker(
                worker_id, role, scenario, self.clock, self, host, tiers.get(worker_id)
            )
            for worker_id, role in scenario.roles.items()
        }
        # The autoscaler computes the demand from these counters of requests and tokens.
        self.meter = DemandMeter()
        self._calibration = Calibration()
        self.view = View(scenario, self.clock, list(self.workers.values()), self._plan_release)
        self._take_turns = any(a.tenant or a.priority for a in arrivals)
        self._turns: Turns[Request] = Turns()
        self._pairs = {w: scenario.true_pair(w) for w in self.workers}
        for worker in self.workers.values():
            self._start_log(worker)

    @property
    def share_begun(self) -> float:
        """Fraction of the trace's requests that have arrived, from 0 to 1. Any thread may read
        it."""
        return len(self.requests) / max(1, len(self._arrivals))

    def run(self) -> None:
        for fault in self.scenario.faults:
            self.clock.at(fault.at_s, self._inject, fault)
        self._plan_arrival(0)
        self.clock.run()

    # The workers call the next methods, which implement `Listener`.
    def reserved(self, worker: SimulatedWorker, task: Task) -> None:
        self._ask_candidate(_request(task))

    def prefilled(self, worker: SimulatedWorker, task: Task) -> None:
        request = _request(task)
        if not request.first_token_s:
            request.first_token_s = self.clock.now_s
            self.meter.first_token(
                request.ttft_s / self.scenario.slo.ttft.seconds(request.arrival.num_tokens)
            )
            if request.promise is not None and request.num_submissions == 1:
                self._calibration = self._calibration.kept(request.promise, self.clock.now_s)
        request.num_current_output_tokens = 1
        size = self.scenario.block_size
        request.loaded_tokens = {name: n * size for name, n in task.loaded_blocks.items()}
        request.cached_tokens = task.cached_tokens + sum(request.loaded_tokens.values())
        if request.sent is not None:
            self.view.note_first_token(request.sent, worker.worker_id)
            request.sent = None
        pulled = task.pulled_blocks * size - task.cached_tokens
        request.num_pulled_tokens = max(0, pulled)
        if task is request.lease:
            assert request.decode is not None
            assert request.decode_task is not None
            exposed_s = exposed_pull_s(
                self.scenario,
                self._pairs[request.decode.worker_id],
                worker,
                request.decode_task,
                request.cached_tokens,
            )
            self.clock.after(exposed_s, self._finish_pull, request, task)

    def refused(self, worker: SimulatedWorker, task: Task) -> None:
        request = _request(task)
        if task is request.lease:
            self._ask_candidate(request)
            return
        request.refused |= {f"{worker.worker_id}/{worker.epoch}"}
        request.decode_task = None
        self._leave(request)
        self._place(request)

    def decoded(self, worker: SimulatedWorker, task: Task) -> None:
        request = _request(task)
        self._end(request)
        # This saves memory, because all requests are kept until the end of the run.
        request.hashes = ()

    def blocks_changed(
        self,
        worker: SimulatedWorker,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: str = "",
    ) -> None:
        holder = holder_of(worker.worker_id, tier)
        number = self._logs[holder]
        applied = _run_now(self._index.publish(holder, str(worker.epoch), number, stored, removed))
        assert applied
        self._logs[holder] = number + 1

    def load_changed(self, worker: SimulatedWorker) -> None:
        self.view.note_load(worker)

    # The next methods move a request from its arrival to its end.
    def _plan_arrival(self, at: int) -> None:
        if at < len(self._arrivals):
            self.clock.at(self._arrivals[at].at_s, self._arrive, at)

    def _arrive(self, at: int) -> None:
        arrival = self._arrivals[at]
        num_full = arrival.num_tokens // self.scenario.block_size
        hashes = arrival.block_digests() if self._has_tiers else arrival.block_hashes()
        request = Request(arrival, hashes[:num_full])
        self.requests.append(request)
        self._plan_arrival(at + 1)
        if self._take_turns:
            self._wait(request)
        else:
            self._place(request)

    def _wait(self, request: Request) -> None:
        """Lets a request wait for its turn. Refuses the request, or another one, if too many wait
        or the first token would be too late."""
        arrival = request.arrival
        work, matches = self._look_up(request)
        depth = max(matches.values(), default=0) * self.scenario.block_size
        request.tokens_missing = max(0, work.num_tokens - depth)
        completion = min(arrival.output_tokens, COMPLETION_TOKENS_LIKELY)
        workers = self.view.roster.by_id.values()
        request.claim = Claim(
            arrival.tenant,
            work_s(workers, request.tokens_missing, completion),
            session=arrival.session,
            priority=arrival.priority,
        )
        if self._turns or not self._has_capacity():
            placement = self._policy(work, self.view.roster, matches, self._rng)
            ahead_s = self._turns.cost_ahead(request.claim) / len(workers)
            if placement is None or not self._admit(request, work, placement, ahead_s):
                self._fail(request, "refused")
                return
            request.is_in_turn = True
        self._turns.push(request.claim, request)
        if len(self._turns) > WAITING_MAX:
            last = self._turns.last()
            self._turns.remove(last)
            self._fail(last, "refused")
        if request.first_token_by < math.inf:
            self.clock.at(request.first_token_by, self._give_up, request)
        self._release()

    def _give_up(self, request: Request) -> None:
        if self._turns.remove(request):
            self._fail(request, "refused")

    def _plan_release(self) -> None:
        if self._turns:
            self.clock.after(0.0, self._release)

    def _release(self) -> None:
        while self._turns and self._has_capacity():
            request = self._turns.pop()
            request.is_charged = True
            self._place(request)
            if not self._turns:
                self._turns.forget()

    def _has_capacity(self) -> bool:
        self.view.tick()
        limit_s = self.scenario.slo.ttft.base_s if self.scenario.admission else 0.0
        return has_capacity(
            self.view.roster.by_id.values(),
            queued_max_s=queued_max_s(limit_s, self._calibration),
            completion_tokens=self.meter.output_tokens_mean,
        )

    def _look_up(self, request: Request) -> tuple[Work, dict[str, int]]:
        """Returns the properties of a request that placement needs, and who has its blocks."""
        work = Work(
            request.num_tokens,
            self.scenario.block_size,
            completion_tokens=self.meter.output_tokens_mean or COMPLETION_TOKENS_LIKELY,
            is_of_session=request.arrival.in_session,
        )
        matches = _run_now(self._index.match(request.hashes))
        if self._has_tiers:
            matches = with_shared_tiers(matches)
        self.view.tick()
        return work, matches

    def _place(self, request: Request) -> None:
        work, matches = self._look_up(request)
        while True:
            placement = self._policy(
                work, self.view.roster, matches, self._rng, refused=request.refused
            )
            if placement is None or not self._admit(request, work, placement):
                self._fail(request, "refused")
                return
            if self._submit(request, placement, matches):
                return
            request.refused |= {placement.decode.epoch}

    def _admit(
        self, request: Request, work: Work, placement: Placement, ahead_s: float = 0.0
    ) -> bool:
        """Returns whether the router admits a request or refuses it early. An admitted request
        stays admitted if it migrates or a worker refuses it."""
        if request.is_admitted and not request.is_in_turn:
            return True
        if not request.is_in_turn:
            self.meter.new_request(placement.prefill_s(work))
        request.is_in_turn = False
        if self.scenario.admission:
            decision = admit(
                work,
                placement,
                self.scenario.slo.ttft,
                self._calibration,
                ahead_s=ahead_s,
                completion_tokens=self.meter.output_tokens_mean,
                now=self.clock.now_s,
                waited_s=self.clock.now_s - request.arrival.at_s if self._take_turns else 0.0,
            )
            request.promise = decision.promise
            request.first_token_by = request.arrival.at_s + decision.within_s
            request.is_admitted = decision.is_admitted
        else:
            request.is_admitted = True
        return request.is_admitted

    def _submit(self, request: Request, placement: Placement, matches: dict[str, int]) -> bool:
        size = self.scenario.block_size
        worker = self.workers[placement.decode.worker_id]
        request.decode = request.prefill = worker
        request.num_submissions += 1
        request.candidates = [w.worker_id for w in placement.prefill_candidates]
        if self.scenario.pull_prefixes:
            request.holders = [
                (h.worker.worker_id, h.num_blocks * size, h.load_s)
                for h in placement.prefix_holders
            ]
        task = request.make_task(request.tokens_left)
        request.decode_task = task
        request.lease = None
        request.candidates = peers_to_ask(
            self.scenario, worker, task, placement.prefill_candidates, matches
        )
        noted = request.candidates[0] if request.candidates else worker.worker_id
        if request.candidates:
            accepted = worker.reserve(task)
            self.view.note_sent(worker.worker_id)
        else:
            accepted = self._prefill(request, worker, task)
        if accepted:
            if worker.role == "prefill":
                request.is_staying = True
                self.view.note_staying(worker.worker_id, 1)
            request.sent = self.view.note_prefill(
                noted,
                request.num_tokens,
                placement.tokens_missing,
                may_pull=bool(request.holders),
            )
        return accepted

    def _ask_candidate(self, request: Request) -> None:
        """Opens a lease on the next candidate, a worker that may prefill the prompt. If there is no
        candidate left, the decode worker prefills the prompt."""
        assert request.decode is not None
        assert request.decode_task is not None
        while request.candidates:
            peer = self.workers[request.candidates.pop(0)]
            lease = request.make_task(0)
            request.lease = lease
            request.prefill = peer
            if peer.is_up and not peer.is_draining and self._prefill(request, peer, lease):
                return
        request.lease = None
        request.prefill = request.decode
        request.decode.release(request.decode_task)
        if not self._prefill(request, request.decode, request.decode_task):
            self._fail(request, "refused")

    def _prefill(self, request: Request, worker: SimulatedWorker, task: Task) -> bool:
        """Submits a task to the worker that prefills the prompt. If it is faster to pull the first
        blocks from another worker, the task is submitted after the pull. Returns False if the
        worker refuses the task."""
        holders = [each for each in request.holders if self.workers[each[0]].is_up]
        found = None
        if holders:
            pair = self._pairs[worker.worker_id]
            found = expect_pull(self.scenario, worker, task, holders, pair)
        if found is None:
            return worker.submit(task)
        holder, expected, load_s = found
        num_blocks = expected.start // self.scenario.block_size
        pull_s = expected.pull_s - load_s
        if load_s:
            loaded = self.workers[holder].load_for_peer(task.hashes[:num_blocks])
            if loaded is None:
                return worker.submit(task)
            loaded_s, num_loaded = loaded
            pull_s = loaded_s + pull_s * num_loaded / num_blocks
            num_blocks = num_loaded
        task.pulled_blocks = num_blocks
        arrives = (request, worker, task, worker.epoch)
        self.clock.after(pull_s, self._submit_pulled, *arrives)
        return True

    def _submit_pulled(
        self, request: Request, worker: SimulatedWorker, task: Task, epoch: int
    ) -> None:
        alive = worker.is_up and worker.epoch == epoch
        if task not in (request.lease, request.decode_task) or request.failure:
            return
        if not alive:
            self._lose(request, task)
        elif not worker.submit(task):
            if task is request.lease:
                self._ask_candidate(request)
            else:
                self._fail(request, "refused")

    def _finish_pull(self, request: Request, lease: Task) -> None:
        if lease is not request.lease:
            return
        assert request.decode is not None
        assert request.decode_task is not None
        assert request.prefill is not None
        request.prefill.release(lease)
        request.lease = None
        if request.tokens_left > 1:
            request.decode.adopt(request.decode_task)
        else:
            request.decode.release(request.decode_task)
            self._end(request)

    def _fail(self, request: Request, failure: str) -> None:
        request.failure = failure
        self._settle(request, request.num_output_tokens + request.num_current_output_tokens)

    def _leave(self, request: Request) -> None:
        """Records that a request no longer decodes on a prefill worker, if it did."""
        if request.is_staying and request.decode is not None:
            request.is_staying = False
            self.view.note_staying(request.decode.worker_id, -1)

    def _settle(self, request: Request, num_completion: int) -> None:
        """Corrects what an ended request has counted for its tenant; nothing if no worker got
        it."""
        self._leave(request)
        if request.is_charged:
            request.is_charged = False
            num_missing = request.tokens_missing if request.num_submissions else 0
            workers = self.view.roster.by_id.values()
            self._turns.settle(request.claim, work_s(workers, num_missing, num_completion))

    def _end(self, request: Request) -> None:
        request.ended_s = self.clock.now_s
        self._settle(request, request.arrival.output_tokens)
        self.meter.ended(request.arrival.output_tokens)
        if (count := request.arrival.output_tokens - 1) > 0:
            self.meter.next_tokens(request.tpot_s / self.scenario.slo.tpot_s, count)

    # The autoscaler calls the next methods.
    @property
    def has_more(self) -> bool:
        """True until the last request of the trace has arrived."""
        return len(self.requests) < len(self._arrivals)

    def start_worker(self, worker: SimulatedWorker) -> None:
        """Starts a stopped worker. The KV pool is empty, and the disk tier has the blocks that it
        had before."""
        worker.restart()
        self._start_log(worker)
        if worker.tiers is not None:
            for tier, held in worker.tiers.held().items():
                self.blocks_changed(worker, held, (), tier)
        self.view.note_state(worker)

    def drain_worker(self, worker: SimulatedWorker) -> None:
        """Drains a worker: it gets no new requests."""
        worker.is_draining = True
        self.view.note_drain(worker)

    def stop_worker(self, worker: SimulatedWorker) -> None:
        """Stops a worker, and removes its blocks from the prefix index."""
        worker.fail()
        for holder in _holders(worker):
            _run_now(self._index.forget(holder))
        self.view.note_state(worker)

    # The next methods simulate faults.

    def _inject(self, fault: Fault) -> None:
        worker = self.workers[fault.worker_id]
        if fault.state == "up":
            if not worker.is_up:
                self.start_worker(worker)
            return
        if not worker.is_up:
            return
        self.stop_worker(worker)
        for request in self.requests:
            if not request.ended_s and not request.failure:
                if request.decode is worker:
                    self._lose(request, request.decode_task)
                elif request.prefill is worker and request.lease is not None:
                    self._lose(request, request.lease)

    def _lose(self, request: Request, task: Task | None) -> None:
        if task is not None and task is request.lease:
            # The prefill worker died before the decode worker had pulled all blocks. Another worker
            # computes the prompt again.
            request.lease = None
            self._ask_candidate(request)
            return
        self._leave(request)
        lease = request.lease
        peer = request.prefill
        request.lease = request.decode_task = None
        if lease is not None and peer is not None:
            peer.cancel(lease)
        if request.num_migrations >= MIGRATIONS_MAX:
            self._fail(request, "lost")
            return
        request.num_migrations += 1
        # A request that migrates has no deadline for its first token.
        request.first_token_by = math.inf
        # If the worker was decoding the task when it died, the number of generated tokens is known.
        if task is not None and task.tokens_left is not None:
            request.num_current_output_tokens = task.output_tokens - task.tokens_left
        request.num_output_tokens += request.num_current_output_tokens
        request.num_current_output_tokens = 0
        if request.tokens_left:
            self._place(request)
        else:
            self._end(request)

    def _start_log(self, worker: SimulatedWorker) -> None:
        for holder in _holders(worker):
            self._logs[holder] = 0
            _run_now(self._index.reset(holder, str(worker.epoch)))


def _holders(worker: SimulatedWorker) -> list[str]:
    tiers = [] if worker.tiers is None else worker.tiers.names
    return [holder_of(worker.worker_id, tier) for tier in ("", *tiers)]


def _request(task: Task) -> Request:
    assert isinstance(task.owner, Request)
    return task.owner


def _run_now(call: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of the in-memory prefix index without an event loop. This works because such
    a coroutine never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the index waited")
