"""Two simulated decode and two prefill workers that pull blocks from each other, and their clients.

It is part of the property test's state machine: how the cluster starts, fails and ends, and what
its clients must see. All workers can read from each other, by NIXL or gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tandem.common.worker_load import WorkerLoad
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.prefill.prefix_choice import ConnectedHolder
from tests.grouped_toy import GroupedToyRunner, Windows
from tests.harness.simulated_cluster import Node
from tests.harness.simulated_loop import SimulatedLoop
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric
from tests.harness.simulated_streams import Fetch, PeersOf, Stream
from tests.harness.transfer_checks import TransferChecks

DECODE, PREFILL = ("d0", "d1"), ("p0", "p1")
WORKERS = DECODE + PREFILL
MAX_MODEL_LEN = 14
ROUNDS_MAX = 400


@dataclass
class Request:
    """A request as known by its client."""

    prompt: list[int]
    expected: list[int]
    consumer: str
    made: list[int] = field(default_factory=list)
    is_over: bool = False


class TransferCluster(TransferChecks):
    is_started = False

    def start_cluster(
        self,
        *,
        block_size: int,
        num_blocks: int,
        piece_blocks: int,
        by_grpc: set[str],
        windows: Windows,
        **settings: Any,
    ) -> None:
        """`by_grpc`: workers whose blocks are transferred by gRPC. `num_blocks`: more than one
        request needs. `windows`: one for each KV group."""
        self.loop = SimulatedLoop()
        asyncio.set_event_loop(self.loop)
        # The pool fits the largest request alone and little more.
        self.windows = windows
        self.settings = {
            "block_size": block_size,
            "num_blocks": -(-MAX_MODEL_LEN // block_size) + num_blocks,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 3,
            "windows": windows,
            **settings,
        }
        block_bytes = GroupedToyRunner(windows, block_size=block_size).layout().block_bytes
        self.fabric = SimulatedFabric()
        piece_size = SimpleNamespace(
            num_bytes=piece_blocks * block_bytes, observe=lambda num_bytes, seconds: None
        )
        self.agents: list[SimulatedAgent] = []
        clock = SimpleNamespace(monotonic=self.loop.time)
        self.patches: list[Any] = [
            patch("tandem.transfer.thread.NixlAgent", self._new_agent),
            patch("tandem.transfer.reads.block_reader.PieceSize", lambda _: piece_size),
            patch("tandem.worker.kv_pulls.lease.time", clock),
            patch("tandem.engine.scheduler.early_reuse.time", clock),
            patch("tandem.worker.prefill.prefix_pull.holders_worth_using", _who_have_more),
            patch(
                "tandem.worker.prefill.prefix_pull._DEADLINE_MIN_S", 6.0
            ),  # computing takes no simulated time
        ]
        for each in self.patches:
            each.start()
        self.by_grpc = by_grpc
        self.streams: list[Stream] = []
        self.fetches: list[Fetch] = []
        self.kv_by_hash: dict[tuple[int, bytes], list[int]] = {}
        self.violations: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.graveyard: list[Node] = []  # replaced workers, whose memory may still be read
        self.requests: dict[str, Request] = {}
        self.routers: dict[str, asyncio.Queue[pb.DecodeCommand]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        for worker_id in WORKERS:
            self._start_worker(worker_id, 0)
        self.is_started = True

    def replace_worker(self, worker_id: str, *, reachable: bool) -> None:
        """Replaces a worker by a new process. Its memory may be reused."""
        old = self.nodes[worker_id]
        old.is_dead = True
        old.runner.kv.fill_(-3.0)
        self.graveyard.append(old)
        for agent in self.agents:
            if agent.name.startswith(f"{old.peer_id}-"):
                agent.close()  # also ends all reads of its process
        if not reachable:
            self.fabric.unreachable.add(old.peer_id)
        for call in self._calls:
            if call.consumer is old:
                call.consumer_crashed(reachable=reachable)
            if call.producer is old:
                self.loop.call(call.end_at_producer)
        for request in self.requests.values():
            if request.consumer == worker_id:
                request.is_over = True  # ended for this worker; its router restarts it elsewhere
        self.tasks[worker_id].cancel()
        self.loop.settle()
        self._start_worker(worker_id, int(old.epoch) + 1)

    def check_cluster(self) -> None:
        self._check_cluster()
        for task in self.tasks.values():
            assert not task.done() or task.result(), "a router's stream ended"

    def stop(self) -> None:
        for each in self.patches:
            each.stop()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call(lambda: None)
        self.loop.close()
        asyncio.set_event_loop(None)

    def finish(self) -> None:
        """Ends all faults. Checks that every request ends in bounded time and that nothing is
        left."""
        for node in self.nodes.values():
            node.hangs = False
        for _ in range(ROUNDS_MAX):
            if self._is_quiet():
                break
            self.round(0.5)
        unended = [key for key, request in self.requests.items() if not request.is_over]
        assert not unended, f"{unended} never end"
        for node in self.nodes.values():
            load = node.engine.load()
            assert load.blocks_quarantined == 0, f"{node.worker_id} keeps blocks in quarantine"
            assert node.engine.stats().blocks_free + load.blocks_cached == load.blocks_total
            assert not node.engine._sequences
            assert not len(node.engine._peer_blocks)
            assert not node.prefill.num_leases, f"{node.worker_id} keeps a lease"
            assert not node.decode.num_sequences
            ledger = node.process._ledger
            assert not ledger._unsafe
            assert not ledger._quarantined

    def _is_quiet(self) -> bool:
        loads = [node.engine.load() for node in self.nodes.values()]
        return all(request.is_over for request in self.requests.values()) and not (
            self._wires()
            or any(load.blocks_used or load.blocks_quarantined for load in loads)
            or any(node.socket.received for node in self.nodes.values())
            or any(node.engine._sequences for node in self.nodes.values())
        )

    def round(self, seconds: float) -> None:
        for node in self.nodes.values():
            self.loop.call(node.turn)
        self.check_cluster()
        for wire in self._wires():
            self.loop.call(wire)
        for call in self._calls:
            self.loop.call(call.ping)
        for agent, read in self._reads():
            agent.land(read, 0)
        for node in self.nodes.values():
            self.loop.call(node.turn_transfers)
        self.loop.advance(seconds)
        self.check_cluster()

    def _new_agent(self, name: str, **_: object) -> SimulatedAgent:
        self.agents = [agent for agent in self.agents if not agent.is_closed]
        agent = SimulatedAgent(self.fabric, name)
        self.agents.append(agent)
        return agent

    def _open_calls(self) -> list[Stream | Fetch]:
        calls = [*self.streams, *self.fetches]
        return [call for call in calls if call.is_open_at_producer or call.is_open_at_consumer]

    def _start_worker(self, worker_id: str, epoch: int) -> None:
        peers = PeersOf(worker_id, self.nodes, self.streams, self.fetches, self.by_grpc)
        node = Node(self.loop, worker_id, str(epoch), peers, **self.settings)
        self.nodes[worker_id] = node
        self._watch_trust(node)
        commands = self.routers[worker_id] = asyncio.Queue()
        self.tasks[worker_id] = self.loop.create_task(self._route(node, commands))
        self.loop.settle()

    async def _route(self, node: Node, commands: asyncio.Queue[pb.DecodeCommand]) -> None:
        async def read() -> AsyncIterator[pb.DecodeCommand]:
            while True:
                yield await commands.get()

        async for message in node.decode.serve(read(), WorkerLoad()):
            for update in message.sequences:
                request = self.requests[update.request_id]
                assert not request.is_over, f"{update} came after the end"
                request.made += update.token_ids
                if update.finish_reason == "error":
                    # No block was free instead of a prefix block that a read may still write. Its
                    # router computes it elsewhere. No other error is allowed.
                    assert update.error.code == "queue_full", update
                    request.is_over = True
                    continue
                assert request.made == request.expected[: len(request.made)], "wrong tokens"
                if update.finish_reason:
                    assert request.made == request.expected
                    request.is_over = True


def _who_have_more(
    holders: Iterable[ConnectedHolder],
    *,
    num_cached_blocks: int,
    block_size: int,
    **prediction: object,
) -> list[ConnectedHolder]:
    """Selects every holder with more blocks, however long the pull is predicted to take."""
    return [each for each in holders if each.num_tokens > num_cached_blocks * block_size]
