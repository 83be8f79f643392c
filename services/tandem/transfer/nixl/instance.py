"""One life of the consumer: an agent, its blocks and its peers' blocks by number.

    made when first needed --> peers loaded and unloaded --> closed: nothing of it writes any more

Whole pools are named once, here when the agent is made and a peer's when it is loaded. A pull then
gives numbers of blocks only. The agent has no progress thread: an idle one costs nothing.
"""

import ctypes
import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.errors import TandemError
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.messages import LocalPool, RemotePool
from tandem.transfer.nixl.ucx_mode import UcxMode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPeer:
    agent_name: str
    block_list: int


class AgentInstance:
    """A NIXL agent with its peers. Methods raise TandemError; those that clean up log errors."""

    def __init__(
        self,
        agent_name: str,
        mode: UcxMode | None,
        pool: LocalPool,
        scratch: ctypes.Array[ctypes.c_char],
    ) -> None:
        """`scratch`: memory of some blocks, where probes read to."""
        self.agent = NixlAgent(agent_name, mode=mode, progress_delay_us=None, memory=pool.memory)
        self._peers: dict[bytes, LoadedPeer] = {}  # by metadata
        self._ended: list[int] = []  # handles of reads that are DONE
        blocks = pool.remote()
        self.pool_list = self._open(blocks)
        _, size = blocks.spans.pools[0]  # probes read the first pool's blocks
        num_blocks, address = len(scratch) // size, ctypes.addressof(scratch)
        self.scratch_list = self._open(
            RemotePool(address, num_blocks, size, device_id=0, memory="DRAM")
        )

    @property
    def holds_ended(self) -> bool:
        """True if `release_ended` has something to do."""
        return bool(self._ended)

    def release_later(self, handle: int) -> None:
        """Keeps the handle of a DONE read for `release_ended`: its waiter is told first."""
        self._ended.append(handle)

    def release_ended(self) -> None:
        for handle in self._ended:
            with logged("a handle goes with the agent"):
                self.agent.release(handle)
        self._ended.clear()

    def load(self, metadata: bytes, pool: RemotePool) -> LoadedPeer:
        """Returns the peer, which it loads if it is not loaded yet."""
        if metadata not in self._peers:
            name = self.agent.add_peer(metadata)
            self._peers[metadata] = LoadedPeer(name, self.agent.list_blocks(name, pool))
        return self._peers[metadata]

    def unload_strays(self, wanted: Container[bytes], in_use: Container[str]) -> None:
        """Forgets all peers that are not wanted, unless a read from them may still come."""
        for metadata in [each for each in self._peers if each not in wanted]:
            self.unload(metadata, in_use)

    def unload(self, metadata: bytes, in_use: Container[str]) -> None:
        """Forgets a peer, unless a read from its agent may still come."""
        peer = self._peers.get(metadata)
        if peer is None or peer.agent_name in in_use:
            return
        del self._peers[metadata]
        with logged("its list goes with the agent"):
            self.agent.release_list(peer.block_list)
        with logged("NIXL has dropped the peer by itself"):
            self.agent.remove_peer(peer.agent_name)

    def _open(self, blocks: RemotePool) -> int:
        """Makes blocks here readable into; returns the handle of their list."""
        self.agent.register(
            address=blocks.address,
            num_bytes=blocks.spans.memory_bytes,
            device_id=blocks.device_id,
            memory=blocks.memory,
        )
        return self.agent.list_blocks(None, blocks)

    def close(self) -> None:
        self.release_ended()
        lists = [self.pool_list, self.scratch_list]
        for block_list in [*lists, *(peer.block_list for peer in self._peers.values())]:
            with logged("its list goes with the agent"):
                self.agent.release_list(block_list)
        self._peers.clear()
        self.agent.close()


@contextmanager
def logged(consequence: str) -> Iterator[None]:
    """Logs the errors of NIXL calls that clean up, and may fail when a peer is lost already."""
    try:
        yield
    except TandemError as error:
        log.info("%s: %s", error.message, consequence)
