"""A consumer's agent, with lists of the blocks of the local pool and of the peers' pools.

When the agent is created, it registers the local KV pool. When a rank of a peer is loaded, the
agent prepares a list of the blocks in its pool, so that a pull can name these blocks by number.
`close` destroys the agent, which ends all reads except copies that a GPU has queued.
"""

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.errors import TandemError
from tandem.transfer.reads.agent import ReadAgent
from tandem.transfer.reads.block_list import BlockList
from tandem.transfer.reads.messages import RemotePool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPeer:
    agent_name: str
    block_list: int


class AgentInstance:
    """A consumer's agent with the loaded peers.

    Methods raise TandemError, but methods that release or unload something only log errors.
    """

    def __init__(self, agent: ReadAgent, *local: RemotePool) -> None:
        """Reads can write into the memory `local`."""
        self.agent = agent
        self._peers: dict[bytes, LoadedPeer] = {}  # metadata of a peer's rank -> loaded rank
        self._local: dict[BlockList, int] = {}  # local blocks -> handle of their list
        self._ended: list[int] = []  # handles of DONE reads that `release_ended` will release
        for memory in local:
            agent.register(
                address=memory.address,
                num_bytes=memory.spans.memory_bytes,
                device_id=memory.device_id,
                memory=memory.memory,
            )

    @property
    def holds_ended(self) -> bool:
        """True if `release_ended` has handles to release."""
        return bool(self._ended)

    def release_later(self, handle: int) -> None:
        """Keeps the handle of a DONE read until `release_ended` is called.

        Releasing takes time, so the result of the pull is reported first.
        """
        self._ended.append(handle)

    def release_ended(self) -> None:
        for handle in self._ended:
            with logged("the handle is freed when the agent is destroyed"):
                self.agent.release(handle)
        self._ended.clear()

    def load(self, metadata: bytes, blocks: BlockList) -> LoadedPeer:
        """Loads the rank of a peer with this metadata, unless it is loaded already. Returns the
        loaded rank, with a list of its blocks `blocks`."""
        if metadata not in self._peers:
            name = self.agent.add_peer(metadata)
            self._peers[metadata] = LoadedPeer(name, self.agent.list_blocks(name, blocks))
        return self._peers[metadata]

    def local_list(self, blocks: BlockList) -> int:
        """Returns the handle of a list of local blocks."""
        if blocks not in self._local:
            self._local[blocks] = self.agent.list_blocks(None, blocks)
        return self._local[blocks]

    def unload_strays(self, wanted: Container[bytes], in_use: Container[str]) -> None:
        """Unloads all peers whose metadata is not in `wanted`.

        A peer whose agent name is in `in_use` stays loaded, because an unfinished read may use it.
        """
        for metadata in [each for each in self._peers if each not in wanted]:
            self.unload(metadata, in_use)

    def unload(self, metadata: bytes, in_use: Container[str]) -> None:
        """Unloads a peer. Does nothing if the peer's agent name is in `in_use`."""
        peer = self._peers.get(metadata)
        if peer is None or peer.agent_name in in_use:
            return
        del self._peers[metadata]
        with logged("the list of blocks is freed when the agent is destroyed"):
            self.agent.release_list(peer.block_list)
        with logged("the agent has already removed the peer"):
            self.agent.remove_peer(peer.agent_name)

    def close(self) -> None:
        self.release_ended()
        remote = (peer.block_list for peer in self._peers.values())
        for block_list in [*self._local.values(), *remote]:
            with logged("the list of blocks is freed when the agent is destroyed"):
                self.agent.release_list(block_list)
        self._peers.clear()
        self.agent.close()


@contextmanager
def logged(consequence: str) -> Iterator[None]:
    """Suppresses a TandemError of the `with` block, and logs it together with the text
    `consequence`.

    Used for an agent's clean-up calls, which may fail if a peer is already lost.
    """
    try:
        yield
    except TandemError as error:
        log.info("%s: %s", error.message, consequence)
