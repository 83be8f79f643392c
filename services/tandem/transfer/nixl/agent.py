"""One NIXL agent with the UCX backend: what this project uses of NIXL, and its errors as ours.

It stands on NIXL's bindings and not on its `nixl_agent` class, for two reasons: that class fixes
the progress thread's delay at 0, which burns a core (or 2 to 4% at 1000); and its handles release
themselves when Python collects them, while a read under way must never be let go of silently.

Every call lets go of the GIL, so that other Python threads run on. Seen with NIXL 1.5.1: the first
agent of a process takes 0.42 s, a later one 10 ms, a peer 5 ms, and destroying one 3 ms.
An agent is not thread-safe: each belongs to one thread.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.errors import Incompatible, InternalError, TandemError, WorkerLost
from tandem.transfer.nixl.messages import RemotePool
from tandem.transfer.nixl.ucx_mode import UcxMode, backend_options, transports, ucx_tls

BlockIds = NDArray[np.int32]
Span = tuple[int, int]  # address, bytes

PACKAGES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_LISTEN_DELAY_US = 100_000  # NIXL's own default; its listen thread is off


class ReadState(Enum):
    DONE = "done"  # all bytes are in place
    UNDER_WAY = "under_way"
    FAILED = "failed"  # some of its bytes may still land


def load_nixl() -> ModuleType:
    """NIXL's Python API module. Raises Incompatible with the reason when there is none."""
    # A fence throws away reads under way on purpose; UCX would warn of each of them.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # UCX would rewrite the code of mmap, munmap and madvise while threads are within (UCX 1.23: a
    # thread that takes the pool's pages then crashes). Its cache of registrations needs that;
    # the pool is registered once, and for good.
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
    reasons = []
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise Incompatible("NIXL cannot be loaded: " + "; ".join(reasons))


class NixlAgent:
    """An agent, made at once. Methods raise TandemError; `Incompatible` when UCX is missing."""

    def __init__(
        self,
        name: str,
        *,
        mode: UcxMode | None,
        progress_delay_us: int | None,
        memory: str = "DRAM",
    ) -> None:
        """`progress_delay_us` None: no progress thread, progress is made by `state` alone.

        `mode` None: raises Incompatible, as UCX would reach nobody. `memory`: where the blocks lie
        that it moves, "DRAM" or "VRAM".
        """
        if mode is None:
            raise Incompatible(
                "NIXL reaches nobody from here: the kernel or UCX_TLS forbids CMA, and there is no "
                "active RDMA port"
            )
        bindings = load_nixl().nixlBind
        self.name = name
        self._bindings: Any = bindings
        kinds = (value for value in vars(bindings).values() if isinstance(value, type))
        own = (kind for kind in kinds if issubclass(kind, Exception))
        self._errors: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError)
        config = bindings.nixlAgentConfig()
        config.useProgThread = progress_delay_us is not None
        config.pthrDelay = progress_delay_us or 0
        config.useListenThread = False
        config.lthrDelay = _LISTEN_DELAY_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = False
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            with ucx_tls(transports(mode, memory)):
                self._backend: int = self._agent.createBackend("UCX", backend_options(mode))
        except self._errors as error:
            raise Incompatible(f"NIXL has no working UCX backend here: {error}") from error

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        """Makes memory usable as a read's target, and readable by whom `metadata` is given to."""
        with self._translated("registering memory"):
            descriptors = self._bindings.nixlRegDList(
                self._segment(memory), [(address, num_bytes, device_id, "")]
            )
            self._agent.registerMem(descriptors, [self._backend])

    def metadata(self) -> bytes:
        """Returns what a peer needs to read all that is registered. It opens that: guard it."""
        with self._translated("describing the agent"):
            return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Loads a peer's metadata; answers the name of its agent."""
        with self._translated("loading a peer's metadata"):
            return str(self._agent.loadRemoteMD(metadata).decode())

    def remove_peer(self, name: str) -> None:
        with self._translated(f"removing the peer {name}"):
            self._agent.invalidateRemoteMD(name)

    def create_read(
        self,
        peer: str,
        *,
        producer: Sequence[Span],
        producer_device: tuple[str, int],
        local: Sequence[Span],
        local_device: tuple[str, int],
    ) -> int:
        """A read of `producer` spans of the peer into `local` ones, not started; its handle."""
        with self._translated(f"preparing a read from {peer}"):
            handle: int = self._agent.createXferReq(
                self._bindings.NIXL_READ,
                self._spans(local, *local_device),
                self._spans(producer, *producer_device),
                peer,
                "",
                [self._backend],
            )
        return handle

    def list_blocks(self, peer: str | None, pool: RemotePool) -> int:
        """Names the blocks of a pool of a peer or (None) of this agent.

        Reads of blocks by their number then cost a sixth of reads by address. The answer is a
        handle, to be released before the peer is removed.
        """
        rows, address = [], pool.address
        for num_blocks, size in pool.spans.pools:
            rows.append((address, size, pool.device_id, size, num_blocks))
            address += num_blocks * size
        with self._translated("naming blocks"):
            handle: int = self._agent.prepXferDlist(
                self._bindings.NIXL_INIT_AGENT if peer is None else peer,
                self._segment(pool.memory),
                np.array(rows, np.uint64),
                [self._backend],
            )
        return handle

    def release_list(self, handle: int) -> None:
        with self._translated("releasing a list of blocks"):
            self._agent.releasedDlistH(handle)

    def create_block_read(
        self, *, producer_list: int, producer_ids: BlockIds, local_list: int, local_ids: BlockIds
    ) -> int:
        """A read of a peer's blocks into blocks here, pairwise, not started; its handle.

        NIXL itself makes one span of neighbours.
        """
        with self._translated("preparing a read of blocks"):
            handle: int = self._agent.makeXferReq(
                self._bindings.NIXL_READ,
                local_list,
                local_ids,
                producer_list,
                producer_ids,
                "",
                [self._backend],
            )
        return handle

    def start(self, handle: int) -> ReadState:
        """Starts a read; over CMA it copies here, before this returns."""
        with self._translated("starting a read"):
            return self._read_state(self._agent.postXferReq(handle, ""))

    def state(self, handle: int) -> ReadState:
        """Returns the state of a started read; makes progress on all of this agent's reads."""
        with self._translated("a read"):
            return self._read_state(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        """Frees a handle that is DONE or was never started, or one whose agent is closed next."""
        with self._translated("releasing a read"):
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Destroys the agent: no read of it writes any more."""
        self._agent = None

    def _spans(self, spans: Sequence[Span], memory: str, device_id: int) -> Any:
        rows = [(address, num_bytes, device_id) for address, num_bytes in spans]
        return self._bindings.nixlXferDList(self._segment(memory), rows)

    def _segment(self, memory: str) -> Any:
        return {"DRAM": self._bindings.DRAM_SEG, "VRAM": self._bindings.VRAM_SEG}[memory]

    def _read_state(self, status: Any) -> ReadState:
        if status == self._bindings.NIXL_SUCCESS:
            return ReadState.DONE
        if status == self._bindings.NIXL_IN_PROG:
            return ReadState.UNDER_WAY
        return ReadState.FAILED

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            lost = isinstance(error, self._bindings.nixlRemoteDisconnectError)
            kind: type[TandemError] = WorkerLost if lost else InternalError
            raise kind(f"{what}: {type(error).__name__} {error}") from error
