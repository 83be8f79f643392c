"""Any order of messages, landings, cuts, crashes and cancels gives the oracle's tokens and no leak.

The machine drives the real services, engines and consumers of tests/harness/simulated_cluster.py:
two decode workers and two prefill workers, each of which may pull blocks from each other one, by
NIXL or by gRPC. The toy model has one KV group or several, with blocks of other sizes, and its KV
shows any wrong block in the tokens after it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.grouped_toy import continuation
from tests.harness.transfer_cluster import (
    DECODE,
    MAX_MODEL_LEN,
    PREFILL,
    WORKERS,
    Request,
    TransferCluster,
)

ALIKE = [1, 0, 0, 1, 1, 0, 1, 0]
CRASHES_MAX = 2
picks = st.integers(0, 1 << 10)
# Alike at their start, so that there is something to find in caches.
prompts = st.builds(
    lambda num_alike, tail: ALIKE[:num_alike] + tail,
    st.integers(0, 8),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)


class TransferMachine(TransferCluster, RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(0, 6),
        max_tokens_per_step=st.integers(1, 9),
        quarantine_blocks_max=st.sampled_from([0, 2, 100]),
        piece_blocks=st.integers(1, 4),
        by_grpc=st.sampled_from([(), WORKERS, ("d1", "p1")]),
        maps_pool=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None, 3), (5,), (None, 2, 6)]),
        kv_dtype=st.sampled_from(["float32", "int8"]),
        warm=st.sampled_from([(), ("d0",), ("d1", "d0")]),
    )
    def start(
        self,
        piece_blocks: int,
        by_grpc: tuple[str, ...],
        warm: tuple[str, ...],
        **settings: Any,
    ) -> None:
        self.start_cluster(piece_blocks=piece_blocks, by_grpc=set(by_grpc), **settings)
        for worker_id in warm:  # there is something to pull by its hashes
            self.submit([*ALIKE, 0], 1, set(), worker_id, (), [], 0)
            self.go_well(8)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 5),
        stop=st.sets(st.integers(0, 15), max_size=2),
        consumer=st.sampled_from(DECODE),
        order=st.sampled_from([PREFILL, ("p1", "p0"), ("p0",), ()]),
        holders=st.lists(st.sampled_from(WORKERS), max_size=2, unique=True),
        num_held=st.integers(1, 8),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: set[int],
        consumer: str,
        order: tuple[str, ...],
        holders: list[str],
        num_held: int,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        room = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        expected = continuation(prompt, room, self.windows, stop)
        self.requests[request_id] = Request(prompt, expected, consumer)
        self._expect(self.nodes[consumer], prompt + expected)
        candidates = [
            pb.PrefillCandidate(worker_id=each, epoch=self.nodes[each].epoch) for each in order
        ]
        # Who is said to have the prefix need not have it: the tree is a hint.
        prefix_holders = [
            pb.PrefixHolder(worker_id=each, epoch=self.nodes[each].epoch, num_blocks=num_held)
            for each in holders
        ]
        submit = pb.SubmitSequence(
            request_id=request_id,
            input=pb.SequenceInput(
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=pb.Sampling(),
                max_tokens=max_tokens,
                stop_token_ids=sorted(stop),
            ),
            prefill_candidates=candidates,
            prefix_holders=prefix_holders,
        )
        self.routers[consumer].put_nowait(pb.DecodeCommand(submit=submit))
        self.loop.settle()

    @precondition(lambda self: any(r.made for r in self.requests.values()))
    @rule(
        pick=picks,
        consumer=st.sampled_from(DECODE),
        order=st.sampled_from([("p0",), ("p1",), ()]),
        token=st.integers(0, 1),
    )
    def next_turn(self, pick: int, consumer: str, order: tuple[str, ...], token: int) -> None:
        """A chat goes on: most of the prompt is where its last turn was decoded."""
        done = [request for request in self.requests.values() if request.made]
        last = done[pick % len(done)]
        prompt = [*last.prompt, *last.made, token][: MAX_MODEL_LEN - 1]
        self.submit(prompt, 2, set(), consumer, order, [last.consumer], MAX_MODEL_LEN)

    @precondition(lambda self: any(not r.is_over for r in self.requests.values()))
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        going = [key for key, request in self.requests.items() if not request.is_over]
        request_id = going[pick % len(going)]
        self.requests[request_id].is_over = True
        for router in self.routers.values():
            cancel = pb.CancelSequence(request_id=request_id)
            router.put_nowait(pb.DecodeCommand(cancel=cancel))
        self.loop.settle()

    @rule(pick=picks, times=st.integers(1, 4))
    def turn(self, pick: int, times: int) -> None:
        for _ in range(times):
            self.loop.call(self.nodes[WORKERS[pick % len(WORKERS)]].turn)
            self.invariants_hold()

    @rule(worker_id=st.sampled_from(WORKERS))
    def turn_transfers(self, worker_id: str) -> None:
        self.loop.call(self.nodes[worker_id].turn_transfers)

    @precondition(lambda self: self._wires())
    @rule(pick=picks, times=st.integers(1, 4))
    def deliver(self, pick: int, times: int) -> None:
        for _ in range(times):
            if wires := self._wires():
                self.loop.call(wires[pick % len(wires)])
                self.invariants_hold()

    @precondition(lambda self: self._reads())
    @rule(pick=picks, index=picks, num_blocks=st.integers(1, 8))
    def land(self, pick: int, index: int, num_blocks: int) -> None:
        reads = self._reads()
        agent, read = reads[pick % len(reads)]
        for _ in range(min(num_blocks, len(read.waiting))):
            agent.land(read, index)

    @precondition(lambda self: self._reads())
    @rule(pick=picks)
    def fail_read(self, pick: int) -> None:
        reads = self._reads()
        reads[pick % len(reads)][1].failed = True

    @precondition(lambda self: self._open_calls())
    @rule(pick=picks, producer=st.booleans(), consumer=st.booleans())
    def cut(self, pick: int, producer: bool, consumer: bool) -> None:
        calls = self._open_calls()
        call = calls[pick % len(calls)]
        if producer:
            self.loop.call(call.end_at_producer)
        if consumer:
            self.loop.call(call.end_at_consumer)

    @precondition(lambda self: len(self.graveyard) < CRASHES_MAX)
    @rule(worker_id=st.sampled_from(WORKERS), reachable=st.booleans())
    def crash(self, worker_id: str, reachable: bool) -> None:
        self.replace_worker(worker_id, reachable=reachable)

    @rule(worker_id=st.sampled_from(WORKERS))
    def hang(self, worker_id: str) -> None:
        self.nodes[worker_id].hangs = not self.nodes[worker_id].hangs

    @rule(seconds=st.sampled_from([0.3, 1.1, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(rounds=st.integers(1, 12))
    def go_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round(0.1)

    @invariant()
    def invariants_hold(self) -> None:
        if self.is_started:
            self.check_cluster()

    def teardown(self) -> None:
        if not self.is_started:
            return
        try:
            self.finish()
        finally:
            self.stop()


class LongTransferMachine(TransferMachine):
    """The same with many more examples: each run draws others."""


TransferMachine.TestCase.settings = settings(max_examples=45, stateful_step_count=40, deadline=None)
TestTransferMachine = TransferMachine.TestCase
LongTransferMachine.TestCase.settings = settings(
    max_examples=900, stateful_step_count=40, deadline=None
)
TestLong = pytest.mark.timeout(3600)(pytest.mark.slow(LongTransferMachine.TestCase))
