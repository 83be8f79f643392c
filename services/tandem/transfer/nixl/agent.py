"""One NIXL agent with the UCX backend. NIXL's errors are raised as TandemError.

This module uses NIXL's low-level bindings instead of NIXL's class `nixl_agent`, for two reasons:
- `nixl_agent` sets the delay of its progress thread to 0, so the thread occupies a core. With a
  delay of 1000 us, it needs 2 to 4% of a core.
- `nixl_agent` releases the handle of a read when Python collects the handle object. But only the
  caller may decide to release the handle of an unfinished read.

Every call of the bindings releases the GIL. An agent is not thread-safe, so each agent belongs to
one thread. Measured with NIXL 1.5.1: creating the first agent of a process takes 0.42 s, creating
another one 10 ms, adding a peer 5 ms, and destroying an agent 3 ms.
"""

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from tandem.common.cuda_build import cuda_of_torch
from tandem.errors import Incompatible, InternalError, TandemError, WorkerLost
from tandem.transfer.nixl.cuda_version import nixl_modules, why_cuda_differs
from tandem.transfer.nixl.ucx_mode import (
    UcxMode,
    backend_options,
    ucx_environment,
    ucx_settings,
)
from tandem.transfer.reads.agent import BlockIds, ReadState
from tandem.transfer.reads.block_list import BlockList

Span = tuple[int, int]  # (address, number of bytes)

log = logging.getLogger(__name__)

# Delay of NIXL's listen thread. It has no effect, because the listen thread is disabled.
_LISTEN_DELAY_US = 100_000


def load_nixl() -> ModuleType:
    """Imports NIXL's Python API module. Raises Incompatible if the import fails."""
    # Replacing the consumer's agent drops unfinished reads on purpose. With the default log level,
    # UCX would log a warning for each dropped read.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # By default, UCX patches the code of mmap, munmap and madvise while other threads may run these
    # functions. With UCX 1.23, a thread crashes if it maps pages of the KV pool at that moment. UCX
    # needs the patches only for its cache of memory registrations. The cache is of no use here,
    # because the KV pool is registered once.
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
    reasons = []
    for name in nixl_modules():
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise Incompatible("NIXL cannot be loaded: " + "; ".join(reasons))


@cache
def _warn_of_other_cuda(module: str) -> None:
    """Logs once if this module of NIXL and PyTorch are built for different versions of CUDA."""
    if why := why_cuda_differs(module):
        log.warning(
            "%s, so NIXL may be unable to read the GPU's memory. If so, KV blocks are sent "
            "over gRPC. To use NIXL, install nixl-cu%s",
            why,
            cuda_of_torch(),
        )


class NixlAgent:
    """One NIXL agent. Methods raise TandemError.

    The constructor raises Incompatible if NIXL or its UCX backend is missing.
    """

    def __init__(
        self,
        name: str,
        *,
        mode: UcxMode | None,
        progress_delay_us: int | None,
        memory: str = "DRAM",
        with_cuda_ipc: bool = True,
    ) -> None:
        """Creates the agent.

        `mode` selects the transports. With the mode None, UCX could reach no peer, so the
        constructor raises Incompatible. `progress_delay_us` is the pause between two rounds of
        NIXL's progress thread. With None, there is no progress thread, and reads make progress only
        in calls of `state`. `memory` is the kind of memory that has the blocks: "DRAM" or "VRAM".
        Without `with_cuda_ipc`, UCX does not map the memory of peers' GPUs.
        """
        if mode is None:
            raise Incompatible(
                "NIXL can reach no other worker: neither CMA (reading the memory of other "
                "processes) nor RDMA can be used here; the lines CMA and RDMA of `tandem doctor` "
                "show why"
            )
        nixl = load_nixl()
        if memory == "VRAM":
            _warn_of_other_cuda(nixl.__name__)
        bindings = nixl.nixlBind
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
            with ucx_environment(ucx_settings(mode, memory, with_cuda_ipc=with_cuda_ipc)):
                self._backends = [self._agent.createBackend("UCX", backend_options(mode))]
        except self._errors as error:
            raise Incompatible(
                f"the UCX backend of NIXL does not work on this host: {error}"
            ) from error

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        """Registers memory, so that reads of this agent can write into it.

        Every peer that has the agent's `metadata` can read the registered memory.
        """
        with self._translated("registering memory"):
            descriptors = self._bindings.nixlRegDList(
                self._segment(memory), [(address, num_bytes, device_id, "")]
            )
            self._agent.registerMem(descriptors, self._backends)

    def metadata(self) -> bytes:
        """Returns the metadata with which a peer can read all registered memory. The metadata must
        be kept secret."""
        with self._translated("describing the agent"):
            return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Loads a peer's metadata and returns the name of the peer's agent."""
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
        """Prepares a read of the memory spans `producer` of the peer into the spans `local`.

        Returns the handle of the read.
        """
        with self._translated(f"preparing a read from {peer}"):
            handle: int = self._agent.createXferReq(
                self._bindings.NIXL_READ,
                self._spans(local, *local_device),
                self._spans(producer, *producer_device),
                peer,
                "",
                self._backends,
            )
        return handle

    def list_blocks(self, peer: str | None, blocks: BlockList) -> int:
        """Prepares a list of blocks of a peer's memory, or of local memory if `peer` is None.

        With such a list, a read names blocks by number. This takes a sixth of the time that naming
        blocks by address takes. Returns the handle of the list. The list must be released before
        the peer is removed.
        """
        rows = [
            (blocks.address + offset, parts.num_bytes, blocks.device_id, stride, number)
            for parts in blocks.pools
            for offset, stride, number in parts.runs()
        ]
        with self._translated("naming blocks"):
            handle: int = self._agent.prepXferDlist(
                self._bindings.NIXL_INIT_AGENT if peer is None else peer,
                self._segment(blocks.memory),
                np.array(rows, np.uint64),
                self._backends,
            )
        return handle

    def release_list(self, handle: int) -> None:
        with self._translated("releasing a list of blocks"):
            self._agent.releasedDlistH(handle)

    def create_block_read(
        self, *, producer_list: int, producer_ids: BlockIds, local_list: int, local_ids: BlockIds
    ) -> int:
        """Prepares a read of the peer's block `producer_ids[i]` into the local block
        `local_ids[i]`, for each index i.

        Returns the handle of the read. NIXL merges blocks that follow each other in memory.
        """
        try:
            handle: int = self._agent.makeXferReq(
                self._bindings.NIXL_READ,
                local_list,
                local_ids,
                producer_list,
                producer_ids,
                "",
                self._backends,
            )
        except self._errors as error:
            raise self._failure("preparing a read of blocks", error) from error
        return handle

    def start(self, handle: int) -> ReadState:
        """Starts a read. With the transport CMA, the kernel copies all bytes during this call."""
        try:
            return self._read_state(self._agent.postXferReq(handle, ""))
        except self._errors as error:
            raise self._failure("starting a read", error) from error

    def state(self, handle: int) -> ReadState:
        """Returns the state of a started read and makes progress on all of this agent's reads."""
        try:
            return self._read_state(self._agent.getXferStatus(handle))
        except self._errors as error:
            raise self._failure("a read", error) from error

    def release(self, handle: int) -> None:
        """Frees the handle of a read.

        The read should be DONE or never started. If it is unfinished or FAILED, the read may still
        write memory, and the caller must then end it as described at `close`.
        """
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            raise self._failure("releasing a read", error) from error

    def close(self) -> None:
        """Destroys the agent. No read of the agent writes host memory from then on.

        Copies into a GPU's memory that UCX has queued (CUDA IPC) may still run, because UCX does
        not wait for them. They end before a later synchronization of that GPU returns.
        """
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
        """Raises NIXL's errors as TandemError. The methods that each read calls do the same without
        this context manager, which takes longer than some of the calls."""
        try:
            yield
        except self._errors as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> TandemError:
        lost = isinstance(error, self._bindings.nixlRemoteDisconnectError)
        kind: type[TandemError] = WorkerLost if lost else InternalError
        return kind(f"NIXL failed at {what}: {type(error).__name__} {error}")
