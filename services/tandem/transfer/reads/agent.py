"""The interface of an agent, through which one process reads the memory of another one.

There are two agents: `NixlAgent` (nixl/agent.py) and `CudaIpcAgent` (cuda_ipc/agent.py). The code
in this package decides what is read and when a block is safe to reuse, and knows neither of them.
"""

from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.transfer.reads.block_list import BlockList

BlockIds = NDArray[np.int32]


class ReadState(Enum):
    DONE = "done"  # all bytes are in place
    UNDER_WAY = "under_way"
    FAILED = "failed"  # some bytes of the read may still arrive


class ReadAgent(Protocol):
    """Reads blocks of peers. Methods raise TandemError. An agent belongs to one thread."""

    def register(self, *, address: int, num_bytes: int, device_id: int, memory: str) -> None:
        """Registers local memory, so that reads can write into it."""

    def add_peer(self, metadata: bytes) -> str:
        """Makes a peer's memory readable. Returns the agent's name of the peer."""

    def remove_peer(self, name: str) -> None:
        """Ends the access to a peer's memory."""

    def list_blocks(self, peer: str | None, blocks: BlockList) -> int:
        """Prepares a list of blocks of a peer's memory, or of local memory if `peer` is None.

        Returns the handle of the list. The list must be released before the peer is removed.
        """

    def release_list(self, handle: int) -> None: ...

    def create_block_read(
        self, *, producer_list: int, producer_ids: BlockIds, local_list: int, local_ids: BlockIds
    ) -> int:
        """Prepares a read of the part of the peer's block `producer_ids[i]` that is in the first
        list into the part of the local block `local_ids[i]` that is in the second list, for each
        index i. The two parts have the same size. Returns the handle of the read."""

    def start(self, handle: int) -> ReadState:
        """Starts a read. A started read cannot be cancelled."""

    def state(self, handle: int) -> ReadState:
        """Returns the state of a started read, and makes progress on all reads."""

    def release(self, handle: int) -> None:
        """Frees the handle of a read. A read that is not DONE may still write memory."""

    def close(self) -> None:
        """Destroys the agent. Its reads end, except copies that a GPU has queued."""
