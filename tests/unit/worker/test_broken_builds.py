"""Builds that are broken on purpose: the property test's machine must catch each of them.

Each mutant leaves one line of the protocol out. It is patched in for a short script of the
machine's own rules, which the whole build passes; what catches it are the machine's own checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from tandem.engine.sequence import Status
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.reservations import PoolReservation
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.transfer.protocol import BlockPull
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.kv_pulls.lease import ConsumerLease
from tandem.worker.kv_pulls.lease_stream import LeaseStream
from tests.grouped_toy import Windows
from tests.harness.transfer_cluster import WORKERS
from tests.unit.worker.test_transfer_properties import TransferMachine

Mutant = Callable[[ExitStack], None]
Script = Callable[[TransferMachine], None]
PROMPT = [1, 0, 0, 1, 1, 0]
OTHER = [0] * 13
WINDOWS: list[Windows] = [(None,), (None, 3)]  # of the KV groups


def release_before_pull(patches: ExitStack) -> None:
    """The consumer says that its reads are done as soon as it knows of the blocks."""

    def is_whole(self: ConsumerLease, blocks: Any) -> bool:
        return self._next_block == self._end_block

    patches.enter_context(patch.object(ConsumerLease, "_is_whole", is_whole))


def free_while_a_read_is_in_flight(patches: ExitStack) -> None:
    """A sequence that goes takes no heed of reads that may still land in its blocks."""
    give_up = EngineProcess._give_up

    def forget(self: EngineProcess, sequence_id: str) -> list[int]:
        give_up(self, sequence_id)
        return []

    patches.enter_context(patch.object(EngineProcess, "_give_up", forget))


def commit_before_released(patches: ExitStack) -> None:
    """All is read and the first token is there: why wait for `released`?"""
    _forge_released(patches, "start")


def trust_a_hold_before_released(patches: ExitStack) -> None:
    """The same for a prefix that was pulled by its hashes."""
    _forge_released(patches, "hold")


def free_on_hold(patches: ExitStack) -> None:
    """The producer names what it has of a chain, and keeps no reference."""
    apply = EngineProcess._apply

    def let_go(self: EngineProcess, command: messages.Command, frames: list[bytes]) -> None:
        apply(self, command, frames)
        if isinstance(command, messages.HoldPrefix):
            self._engine._peer_blocks.remove(command.sequence_id, ())

    patches.enter_context(patch.object(EngineProcess, "_apply", let_go))


def free_when_computed(patches: ExitStack) -> None:
    """The producer frees when its blocks are computed, not when its consumer has read them."""
    turn = EngineProcess._turn

    def forgetful(self: EngineProcess) -> None:
        turn(self)
        for sequence in list(self._engine._sequences.values()):
            if sequence.status is Status.HELD:
                self._engine.remove(sequence.sequence_id)

    patches.enter_context(patch.object(EngineProcess, "_turn", forgetful))


def write_by_grpc_after_cancel(patches: ExitStack) -> None:
    """A pull by gRPC goes on writing after its lease was given up."""
    pull = GrpcTransport.pull

    async def detached(self: GrpcTransport, blocks: BlockPull) -> float:
        return await asyncio.shield(asyncio.ensure_future(pull(self, blocks)))

    patches.enter_context(patch.object(GrpcTransport, "pull", detached))
    patches.enter_context(patch.object(PoolReservation, "check", lambda *arguments: None))


def reads_land_late(machine: TransferMachine) -> None:
    """Meanwhile the producer has other work, which takes every block that it may take."""
    _submit(machine, PROMPT, order=("p0",))
    _rounds(machine, 10, land=False)
    _submit(machine, OTHER, consumer="d1", order=("p0",))
    _rounds(machine, 10, land=False, consumers=("d1",))
    machine.go_well(6)


def client_goes_in_mid_pull(machine: TransferMachine) -> None:
    _submit(machine, PROMPT, order=("p0",))
    _rounds(machine, 10, land=False)
    machine.cancel(0)
    machine.go_well(4)


def all_goes_well(machine: TransferMachine) -> None:
    _submit(machine, PROMPT, order=("p0",))
    machine.go_well(6)
    machine.go_well(6)


def prefix_is_pulled(machine: TransferMachine) -> None:
    _submit(machine, PROMPT, order=())
    machine.go_well(6)
    machine.go_well(6)
    _submit(machine, PROMPT, consumer="d1", order=(), holders=["d0"])
    machine.go_well(6)
    machine.go_well(6)


def bytes_come_late(machine: TransferMachine) -> None:
    """The client goes while the bytes of its blocks are on their way."""
    _submit(machine, PROMPT, order=("p0",))
    for _ in range(40):
        _rounds(machine, 1)
        if any(fetch.to_consumer for fetch in machine.fetches):
            break
    assert any(fetch.to_consumer for fetch in machine.fetches)
    machine.cancel(0)
    for fetch in machine.fetches:
        while fetch.to_consumer:
            machine.loop.call(fetch.deliver_to_consumer)


# What is broken, where it shows, and which check says so.
BROKEN = [
    (release_before_pull, reads_land_late, "what is committed is not the prompt's KV"),
    (free_while_a_read_is_in_flight, client_goes_in_mid_pull, "may still write blocks"),
    (commit_before_released, all_goes_well, "a commit before `released`"),
    (trust_a_hold_before_released, prefix_is_pulled, "a prefix is trusted before `released`"),
    (free_on_hold, prefix_is_pulled, "a producer let go of blocks"),
    (free_when_computed, all_goes_well, "a producer let go of blocks"),
    (write_by_grpc_after_cancel, bytes_come_late, "written for a lease that is over"),
]


@pytest.mark.parametrize(
    ("mutant", "script", "check"), BROKEN, ids=[mutant.__name__ for mutant, *_ in BROKEN]
)
@pytest.mark.parametrize("windows", WINDOWS)
def test_is_caught(windows: Windows, mutant: Mutant, script: Script, check: str) -> None:
    with ExitStack() as patches:
        mutant(patches)
        with pytest.raises(AssertionError, match=check):
            _play(script, windows)


@pytest.mark.parametrize("script", dict.fromkeys(script for _, script, _ in BROKEN))
@pytest.mark.parametrize("windows", WINDOWS)
def test_the_whole_build_passes(windows: Windows, script: Script) -> None:
    _play(script, windows)


def _play(script: Script, windows: Windows) -> None:
    machine = TransferMachine()
    machine.start(
        block_size=1,
        num_blocks=0,
        max_tokens_per_step=9,
        quarantine_blocks_max=100,
        piece_blocks=1,
        by_grpc=WORKERS if script is bytes_come_late else (),
        maps_pool=True,
        windows=windows,
        kv_dtype="float32",
        warm=(),
    )
    try:
        script(machine)
        machine.finish()
        machine.invariants_hold()
    finally:
        machine.stop()


def _submit(
    machine: TransferMachine,
    prompt: list[int],
    *,
    order: tuple[str, ...],
    consumer: str = "d0",
    holders: list[str] | None = None,
) -> None:
    machine.submit(prompt, 1, set(), consumer, order, holders or [], len(prompt))


def _rounds(
    machine: TransferMachine,
    times: int,
    *,
    land: bool = True,
    consumers: tuple[str, ...] = WORKERS,
) -> None:
    """Rounds in which nothing is delivered of fetches, and reads land only for `consumers`, if
    so.
    """
    for _ in range(times):
        for node in machine.nodes.values():
            machine.loop.call(node.turn)
        for stream in machine.streams:
            for wire in stream.wires:
                machine.loop.call(wire)
        for fetch in machine.fetches:
            if fetch.to_producer:
                machine.loop.call(fetch.deliver_to_producer)
        for agent, read in machine._reads():
            if land or (consumers != WORKERS and agent.name.startswith(consumers)):
                agent.land(read, 0)
        for node in machine.nodes.values():
            machine.loop.call(node.turn_transfers)
        machine.invariants_hold()


def _forge_released(patches: ExitStack, opened_by: str) -> None:
    """Streams that were opened so answer `released` themselves, once it is all that is awaited."""
    write = LeaseStream.write
    read = LeaseStream.read
    lease_ids: dict[LeaseStream, str] = {}  # of streams that were opened so
    awaited: dict[LeaseStream, set[str]] = {}
    nothing_else: dict[LeaseStream, asyncio.Event] = {}

    def came(stream: LeaseStream, what: str) -> None:
        awaited[stream].discard(what)
        if not awaited[stream]:
            nothing_else[stream].set()

    async def note(self: LeaseStream, command: pb.PrefillCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == opened_by:
            lease_ids[self] = getattr(command, kind).lease_id
            awaited[self] = {"release", "answer"}
            nothing_else[self] = asyncio.Event()
        await write(self, command)
        if kind == "release" and self in awaited:
            came(self, "release")

    async def forge(self: LeaseStream) -> pb.PrefillEvent:
        if self not in awaited:
            return await read(self)
        reading = asyncio.ensure_future(read(self))
        forging = asyncio.ensure_future(nothing_else[self].wait())
        try:
            await asyncio.wait({reading, forging}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                epoch = self._peer.epoch
                lease_id = lease_ids[self]
                released = pb.Released(epoch=epoch, lease_id=lease_id, whole=True)
                return pb.PrefillEvent(released=released)
            if reading.result().WhichOneof("event") in ("prefilled", "held"):
                came(self, "answer")
            return reading.result()
        finally:
            reading.cancel()
            forging.cancel()

    patches.enter_context(patch.object(LeaseStream, "write", note))
    patches.enter_context(patch.object(LeaseStream, "read", forge))
