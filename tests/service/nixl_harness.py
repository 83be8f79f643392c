"""A consumer in this process and peers in processes of their own, over real NIXL."""

from __future__ import annotations

import base64
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.config.transfer import TransferConfig
from tandem.transfer.reads import messages as transfer
from tandem.transfer.reads.messages import LocalPool, PeerRank, Pull, PullResult, RemotePool
from tandem.transfer.thread import TransferThread
from tests.service.transfer_pools import PoolBlocks, contents, layout

DEADLINE_S = 20.0
TRANSPORT = "TRANSFER_TRANSPORT"
_ROOT = Path(__file__).parents[2]
_Event = TypeVar("_Event", bound=transfer.TransferEvent)


def transfer_config(**fields: object) -> TransferConfig:
    """The settings of both sides: with UCX_TLS=tcp NIXL may use TCP, else it may not. TRANSPORT is
    the variable of the transport."""
    fields = {
        "nixl_tcp": "insecure" if os.environ.get("UCX_TLS") == "tcp" else "off",
        "transport": os.environ.get(TRANSPORT, "auto"),
        **fields,
    }
    return TransferConfig(**fields)  # type: ignore[arg-type]


def local_pool(memory: NDArray[np.uint8]) -> LocalPool:
    return LocalPool(memory.ctypes.data, memory.nbytes, 0, "DRAM", layout())


class PoolProcess:
    """A process of its own that says in one line how its pool can be read."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 3 * DEADLINE_S)
        assert readable, "the process does not answer"
        return self.process.stdout.readline()

    def pause(self) -> None:
        """Returns when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Peer(PoolProcess):
    """A producer that is read over NIXL alone."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__("tests.service.nixl_peer_process", name, seed)
        self.name = name
        self.contents = PoolBlocks(contents(seed), layout().spans)
        line = base64.b64decode(self.line())
        self.metadata, self.pool = msgspec.msgpack.decode(line, type=tuple[bytes, RemotePool])


class Consumer:
    """A transfer thread with a pool, and its events."""

    def __init__(self, config: TransferConfig) -> None:
        self.blocks = PoolBlocks(np.zeros(layout().pool_bytes, np.uint8), layout().spans)
        self.events: list[transfer.TransferEvent] = []
        self._changed = Condition()
        self.thread = TransferThread(
            local_pool(self.blocks.memory), config, f"consumer-{os.getpid()}", self._on_event
        )
        self.thread.start()

    def _on_event(self, event: transfer.TransferEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, is_true: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(is_true, DEADLINE_S), f"waited in vain: {what}"

    def of_kind(self, kind: type[_Event]) -> list[_Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def connect(self, peer: Peer) -> str:
        """The error of the connection; empty when it works."""
        before = len(self.of_kind(transfer.PeerConnected))
        self.thread.connect(peer.name, [PeerRank(peer.metadata, peer.pool)])
        self.wait(
            lambda: len(self.of_kind(transfer.PeerConnected)) > before, f"{peer.name} to connect"
        )
        event = self.of_kind(transfer.PeerConnected)[-1]
        assert event.peer_id == peer.name
        return event.error

    def submit(
        self,
        pull_id: str,
        peer: Peer,
        producer: list[int],
        local: list[int],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.thread.submit(Pull(pull_id, peer.name, producer, local, deadline_s))

    def result(self, pull_id: str) -> PullResult:
        """Waits for the end of a pull, and sees that it ended once."""

        def results() -> list[PullResult]:
            settled = self.of_kind(transfer.Settled)
            return [event.result for event in settled if event.result.pull_id == pull_id]

        self.wait(lambda: bool(results()), f"{pull_id} to end")
        assert len(results()) == 1
        return results()[0]

    def unfenced(self) -> list[int]:
        return [block for event in self.of_kind(transfer.Unfenced) for block in event.block_ids]

    def wait_unfenced(self, block_ids: list[int]) -> None:
        self.wait(lambda: sorted(self.unfenced()) == sorted(block_ids), f"{block_ids} unfenced")


def holds(condition: Callable[[], bool], during_s: float) -> bool:
    """Returns whether the condition stays true all that time. No event says that nothing
    happens."""
    end = time.monotonic() + during_s
    while time.monotonic() < end:
        if not condition():
            return False
        time.sleep(0.01)
    return condition()
