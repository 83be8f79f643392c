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

from services.engine.sequence import Sequence, Status
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.worker import messages
from services.worker.engine_process import _decoder
from tests.harness.simulated_cluster import Node, PeersOf, SimulatedLoop, Stream
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric, SimulatedRead
from tests.toy_runner import ToyRunner, continuation, kv_of

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


class TransferMachine(RuleBasedStateMachine):
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
        self.agents: list[SimulatedAgent] = []
        self.patches = [
            patch("services.transfer.nixl.NixlAgent", self._new_agent),
            patch("services.transfer.nixl_pull.PIECE_BYTES_MAX", piece_blocks * block_bytes),
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
        for node in self._nodes():
            node.engine.check_integrity()
        self._no_read_writes_a_block_of_others()
        self._nothing_awaited_is_found_by_hash()
        self._sources_hold_what_is_leased()
        for task in self.tasks:
            assert not task.done() or task.result(), "a router's stream ended"

    def _no_read_writes_a_block_of_others(self) -> None:
        for read, (node, owner, blocks) in self._targets():
            allowed = set(node.engine._pool._quarantined)
            if owner is not None and owner.status is Status.AWAITING_KV:
                allowed |= set(owner.block_table[owner.num_stored_blocks :])
            strangers = set(blocks) - allowed
            assert not strangers, f"{read} may still write blocks {strangers} of {node.worker_id}"

    def _nothing_awaited_is_found_by_hash(self) -> None:
        for node in self.readers:
            for sequence in node.engine._sequences.values():
                if sequence.status is Status.AWAITING_KV:
                    for block in sequence.block_table[sequence.num_stored_blocks :]:
                        assert node.engine._pool.is_writable(block), (
                            f"block {block} is hashed or shared before its lease was released"
                        )
                    stored = sequence.num_stored_blocks * sequence.block_size
                    wanted = kv_of(sequence.token_ids)[:stored]
                    found = node.runner.read(sequence.block_table, stored) if stored else []
                    assert found == wanted, "a block in the cache is not what its hash says"

    def _sources_hold_what_is_leased(self) -> None:
        for node in self.sources.values():
            held = set(node.engine._sequences)
            leased = {
                stream.start.lease_id
                for stream in self.streams
                if stream.start and stream.source is node and stream.is_open_at_source
            }
            waiting = [_decoder.decode(frames[0]) for frames in node.socket.received]
            leaving = {each.sequence_id for each in waiting if isinstance(each, messages.Remove)}
            assert held <= leased | leaving, "blocks are held for a stream that is closed"
        for stream in self.streams:
            if stream.lent and stream.is_open_at_source and not stream.source.is_dead:
                self._check_lent(stream)

    def _check_lent(self, stream: Stream) -> None:
        assert stream.start is not None
        engine, lease_id = stream.source.engine, stream.start.lease_id
        table = engine.block_ids(lease_id) if lease_id in engine._sequences else []
        first = stream.start.first_missing_block
        assert table[first : first + len(stream.lent)] == stream.lent, (
            "a source let go of blocks that its reader may still read"
        )
        size = engine.layout.block_size
        wanted = kv_of(list(stream.start.input.token_ids))[first * size :]
        wanted = wanted[: len(stream.lent) * size]
        assert stream.source.runner.read(stream.lent, len(wanted)) == wanted

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

    def _nodes(self) -> list[Node]:
        return [*self.readers, *self.sources.values()]

    def _wires(self) -> list[Any]:
        return [s.deliver_to_source for s in self.streams if s.to_source] + [
            s.deliver_to_reader for s in self.streams if s.to_reader
        ]

    def _reads(self) -> list[tuple[SimulatedAgent, SimulatedRead]]:
        return [(a, read) for a in self.agents for read in a.reads.values() if read.waiting]

    def _new_agent(self, name: str, *, progress_delay_us: int | None) -> SimulatedAgent:
        self.agents = [agent for agent in self.agents if not agent.is_closed]
        agent = SimulatedAgent(self.fabric, name)
        self.agents.append(agent)
        return agent

    def _targets(self) -> list[tuple[SimulatedRead, tuple[Node, Sequence | None, list[int]]]]:
        """Each read that may still write, whose it was when it was first seen, and where."""
        found = []
        for agent, read in self._reads():
            node = next(n for n in self.readers if agent.name.startswith(f"{n.peer_id}-"))
            start, size = node.remote_pool.address, self.fabric.block_bytes
            blocks = [(local - start) // size for _, local in read.waiting]
            owner = read.__dict__.get("owner", "unseen")
            if owner == "unseen":
                sequences = node.engine._sequences.values()
                owner = next((s for s in sequences if set(blocks) <= set(s.block_table)), None)
                read.__dict__["owner"] = owner
            found.append((read, (node, owner, blocks)))
        return found

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

    def _watch_commits(self, node: Node) -> None:
        commit = node.engine.commit

        def checked(sequence_id: str, first_token_id: int) -> None:
            request_id = sequence_id.rpartition("#")[0]
            streams = [s for s in self.streams if s.start and s.start.request_id == request_id]
            assert streams, "a commit without a lease"
            stream = streams[-1]
            released, start = stream.released, stream.start
            assert released is not None, "a commit before `released`"
            assert start is not None
            assert (released.epoch, released.lease_id) == (stream.source.epoch, start.lease_id)
            tokens = node.engine._sequences[sequence_id].token_ids
            found = node.runner.read(node.engine.block_ids(sequence_id), len(tokens))
            assert found == kv_of(tokens), "what is committed is not the prompt's KV"
            commit(sequence_id, first_token_id)

        node.engine.commit = checked  # type: ignore[method-assign]

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


TransferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTransferMachine = TransferMachine.TestCase
