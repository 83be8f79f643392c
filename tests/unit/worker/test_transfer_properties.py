"""Any order of messages, landings, cuts, crashes and cancels gives the oracle's tokens and no leak.

The machine drives the real services, engines and reader of tests/harness/simulated_cluster.py: two
decode workers that pull from two prefill workers. The toy model's KV shows any wrong block in the
tokens after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.rpc.tandem.v1 import worker_pb2 as pb
from tests.harness.simulated_cluster import Node, PeersOf, Stream
from tests.harness.simulated_loop import SimulatedLoop
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric
from tests.harness.transfer_checks import TransferChecks
from tests.toy_runner import ToyRunner, continuation

MAX_MODEL_LEN = 14
ROUNDS_MAX = 400
picks = st.integers(0, 1 << 10)


@dataclass
class Request:
    """What its client knows."""

    prompt: list[int]
    expected: list[int]
    made: list[int] = field(default_factory=list)
    is_over: bool = False


class TransferMachine(TransferChecks, RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(0, 6),
        max_tokens_per_step=st.integers(1, 9),
        quarantine_blocks_max=st.sampled_from([0, 2, 100]),
        piece_blocks=st.integers(1, 4),
    )
    def start(self, block_size: int, num_blocks: int, piece_blocks: int, **limits: int) -> None:
        self.loop = SimulatedLoop()
        asyncio.set_event_loop(self.loop)
        # The largest request fits alone, and not much more.
        self.limits = {
            "block_size": block_size,
            "num_blocks": -(-MAX_MODEL_LEN // block_size) + num_blocks,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 3,
            **limits,
        }
        block_bytes = ToyRunner(block_size=block_size).layout(1).block_bytes
        self.fabric = SimulatedFabric(block_bytes)
        piece_size = SimpleNamespace(
            num_bytes=piece_blocks * block_bytes, observe=lambda num_bytes, seconds: None
        )
        self.agents: list[SimulatedAgent] = []
        self.patches: list[Any] = [
            patch("services.transfer.nixl_generation.NixlAgent", self._new_agent),
            patch("services.transfer.nixl.PieceSize", lambda: piece_size),
            patch("services.worker.lease.time", SimpleNamespace(monotonic=self.loop.time)),
        ]
        for each in self.patches:
            each.start()
        self.streams: list[Stream] = []
        self.sources: dict[str, Node] = {}
        self.graveyard: list[Node] = []  # their memory may still be read
        for worker_id in ("p0", "p1"):
            self._start_source(worker_id, 0)
        self.readers: list[Node] = []
        self.requests: dict[str, Request] = {}
        self.routers: list[asyncio.Queue[pb.DecodeCommand]] = []
        self.tasks: list[asyncio.Task[None]] = []
        for index in range(2):
            self._start_reader(f"d{index}")

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 5),
        stop=st.sets(st.integers(0, 15), max_size=2),
        reader=st.integers(0, 1),
        order=st.sampled_from([("p0", "p1"), ("p1", "p0"), ("p0",), ()]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: set[int],
        reader: int,
        order: tuple[str, ...],
    ) -> None:
        request_id = f"r{len(self.requests)}"
        room = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        self.requests[request_id] = Request(prompt, continuation(prompt, room, stop))
        candidates = [
            pb.PrefillCandidate(worker_id=each, epoch=self.sources[each].epoch) for each in order
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
        )
        self.routers[reader].put_nowait(pb.DecodeCommand(submit=submit))
        self.loop.settle()

    @precondition(lambda self: any(not r.is_over for r in self.requests.values()))
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        going = [key for key, request in self.requests.items() if not request.is_over]
        request_id = going[pick % len(going)]
        self.requests[request_id].is_over = True
        for router in self.routers:
            cancel = pb.CancelSequence(request_id=request_id)
            router.put_nowait(pb.DecodeCommand(cancel=cancel))
        self.loop.settle()

    @rule(pick=picks, times=st.integers(1, 4))
    def turn(self, pick: int, times: int) -> None:
        nodes = self._nodes()
        for _ in range(times):
            self.loop.call(nodes[pick % len(nodes)].turn)
            self.invariants_hold()

    @rule(pick=st.integers(0, 1))
    def turn_transfers(self, pick: int) -> None:
        self.loop.call(self.readers[pick].turn_transfers)

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

    @precondition(lambda self: self.streams)
    @rule(pick=picks, source=st.booleans(), reader=st.booleans())
    def cut(self, pick: int, source: bool, reader: bool) -> None:
        stream = self.streams[pick % len(self.streams)]
        if source:
            self.loop.call(stream.end_at_source)
        if reader:
            self.loop.call(stream.end_at_reader)

    @rule(worker_id=st.sampled_from(["p0", "p1"]), reachable=st.booleans())
    def crash_source(self, worker_id: str, reachable: bool) -> None:
        """Another process takes its place; its memory is somebody else's now."""
        old = self.sources[worker_id]
        old.is_dead = True
        old.runner.kv.fill_(-3.0)
        self.graveyard.append(old)
        if not reachable:
            self.fabric.unreachable.add(old.peer_id)
        for stream in self.streams:
            if stream.source is old:
                self.loop.call(stream.end_at_source)
        self._start_source(worker_id, int(old.epoch) + 1)

    @rule(worker_id=st.sampled_from(["p0", "p1"]))
    def hang(self, worker_id: str) -> None:
        self.sources[worker_id].hangs = not self.sources[worker_id].hangs

    @rule(seconds=st.sampled_from([0.3, 1.1, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(rounds=st.integers(1, 6))
    def go_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round(0.1)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "readers"):
            return
        self._check_cluster()
        for task in self.tasks:
            assert not task.done() or task.result(), "a router's stream ended"

    def teardown(self) -> None:
        if not hasattr(self, "readers"):
            return
        try:
            self._finish()
        finally:
            for each in self.patches:
                each.stop()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call(lambda: None)
            self.loop.close()
            asyncio.set_event_loop(None)

    def _finish(self) -> None:
        """From here all is fair: everybody gets to an end in bounded time, and nothing is left."""
        for node in self.sources.values():
            node.hangs = False
        for _ in range(ROUNDS_MAX):
            if self._is_quiet():
                break
            self._round(0.5)
        unended = [key for key, request in self.requests.items() if not request.is_over]
        assert not unended, f"{unended} never end"
        for node in self._nodes():
            load = node.engine.load()
            assert load.blocks_quarantined == 0, f"{node.worker_id} keeps blocks in quarantine"
            assert load.blocks_free + load.blocks_cached == load.blocks_total
            assert not node.engine._sequences
            assert not node.prefill.num_leases, f"{node.worker_id} keeps a lease"
            assert not node.decode.num_sequences
            ledger = node.process._ledger
            assert not ledger._unsafe
            assert not ledger._quarantined

    def _is_quiet(self) -> bool:
        loads = [node.engine.load() for node in self._nodes()]
        return all(request.is_over for request in self.requests.values()) and not (
            self._wires()
            or any(load.blocks_used or load.blocks_quarantined for load in loads)
            or any(node.socket.received for node in self._nodes())
            or any(node.engine._sequences for node in self._nodes())
        )

    def _round(self, seconds: float) -> None:
        for node in self._nodes():
            self.loop.call(node.turn)
        for wire in self._wires():
            self.loop.call(wire)
        for stream in self.streams:
            self.loop.call(stream.ping)
        for agent, read in self._reads():
            agent.land(read, 0)
        for node in self.readers:
            self.loop.call(node.turn_transfers)
        self.loop.advance(seconds)
        self.invariants_hold()

    def _new_agent(self, name: str, *, progress_delay_us: int | None) -> SimulatedAgent:
        self.agents = [agent for agent in self.agents if not agent.is_closed]
        agent = SimulatedAgent(self.fabric, name)
        self.agents.append(agent)
        return agent

    def _start_source(self, worker_id: str, epoch: int) -> None:
        peers = PeersOf({}, [])
        self.sources[worker_id] = Node(self.loop, worker_id, str(epoch), peers, **self.limits)

    def _start_reader(self, worker_id: str) -> None:
        peers = PeersOf(self.sources, self.streams)
        node = peers.reader = Node(self.loop, worker_id, "0", peers, **self.limits)
        self.readers.append(node)
        commands: asyncio.Queue[pb.DecodeCommand] = asyncio.Queue()
        self.routers.append(commands)
        self.tasks.append(self.loop.create_task(self._route(node, commands)))
        self._watch_commits(node)
        self.loop.settle()

    async def _route(self, node: Node, commands: asyncio.Queue[pb.DecodeCommand]) -> None:
        async def read() -> AsyncIterator[pb.DecodeCommand]:
            while True:
                yield await commands.get()

        async for message in node.decode.serve(read(), pb.WorkerLoad()):
            for update in message.sequences:
                request = self.requests[update.request_id]
                assert not request.is_over, f"{update} came after the end"
                assert update.finish_reason != "error", update
                request.made += update.token_ids
                assert request.made == request.expected[: len(request.made)], "wrong tokens"
                if update.finish_reason:
                    assert request.made == request.expected
                    request.is_over = True


TransferMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestTransferMachine = TransferMachine.TestCase
