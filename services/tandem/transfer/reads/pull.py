"""The progress of one pull.

A pull is split into pieces, so that other pulls and cancels are handled in between (piece_size.py).
A piece is some consecutive blocks of the pull, and is one read of the agent. If the heads of the
blocks are on several ranks of the peer, the pull reads all blocks from one rank after the other.
States of a piece:

    waiting --the read is started--> under way --the read is DONE--> all bytes are in place
                                         `--the read FAILED, or the pull is given up-->
                                                                      bytes may still arrive
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InternalError
from tandem.transfer.reads.agent import ReadAgent, ReadState
from tandem.transfer.reads.instance import AgentInstance, LoadedPeer
from tandem.transfer.reads.messages import Pull
from tandem.transfer.reads.piece_size import READS_MAX, PieceSize


@dataclass(slots=True, eq=False)
class Read:
    """The agent's read of one piece of a pull."""

    handle: int
    agent_name: str  # the agent's name of the rank that is read
    local_ids: list[int]
    # True: the agent reported an error for the read. The read will not become DONE, but bytes may
    # still arrive.
    ended: bool = False


class EqualSizes:
    """The blocks that a pull reads from one rank: all of them, with the same number of bytes each.

    Most pulls move one block or a few, for which each call of numpy takes longer than the whole
    arithmetic of this class.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes

    def end(self, first: int, num_bytes: int) -> int:
        """Returns the end of a piece of at most `num_bytes` bytes that begins with the block
        `first`. A piece has whole blocks, and at least one."""
        return min(self.num_blocks, first + max(1, num_bytes // self._block_bytes))

    def num_bytes(self, first: int, end: int) -> int:
        """Returns the bytes of the blocks `first` to `end` - 1."""
        return (end - first) * self._block_bytes

    def indices(self, first: int, end: int) -> slice:
        """Returns the indices in the pull of the blocks `first` to `end` - 1."""
        return slice(first, end)


class MixedSizes:
    """The same for blocks of several KV groups. Of some groups, this rank may have nothing to
    read."""

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        """`sizes` has the bytes to read of each of the pull's blocks; 0: none."""
        self._blocks = np.flatnonzero(sizes)  # indices of the blocks that are read
        self.num_blocks = len(self._blocks)
        # The bytes of all blocks before each of them, and of all.
        self._starts = np.concatenate(([0], np.cumsum(sizes[self._blocks])))

    def end(self, first: int, num_bytes: int) -> int:
        most = self._starts[first] + num_bytes
        return max(first + 1, int(np.searchsorted(self._starts, most, "right")) - 1)

    def num_bytes(self, first: int, end: int) -> int:
        return int(self._starts[end] - self._starts[first])

    def indices(self, first: int, end: int) -> NDArray[np.intp]:
        return self._blocks[first:end]


@dataclass(frozen=True, slots=True)
class Source:
    """One rank of a peer, and the list of local blocks into which its heads are read."""

    rank: LoadedPeer
    target_list: int
    sizes: EqualSizes | MixedSizes


class PullInPieces:
    """A pull of a peer's blocks into the local KV pool, or a probe into scratch memory. `clock`
    returns the time in seconds."""

    def __init__(
        self,
        pull: Pull,
        sources: Sequence[Source],
        *,
        piece_size: PieceSize,
        clock: Callable[[], float],
    ) -> None:
        self.pull = pull
        self.started_at = clock()
        self.reads: list[Read] = []
        self.num_bytes = sum(each.sizes.num_bytes(0, each.sizes.num_blocks) for each in sources)
        self.post_s = 0.0  # seconds spent in the agent's calls that start reads
        self._piece_size = piece_size
        self._clock = clock
        self._producer_ids = np.array(pull.producer_block_ids, np.int32)
        # A probe has no local blocks. It reads the peer's blocks 0, 1, ... into the blocks 0, 1,
        # ... of the scratch memory, so the target ids are the producer's ids.
        target_ids = pull.local_block_ids or pull.producer_block_ids
        self._target_ids = np.array(target_ids, np.int32)
        # The sources that are not read to the end.
        self._sources = [source for source in sources if source.sizes.num_blocks]
        self._num_started = 0  # number of blocks of the first source whose reads were started

    @property
    def is_done(self) -> bool:
        return not self._sources and not self.reads

    def advance(self, instance: AgentInstance) -> bool:
        """Checks the started reads, and starts at most one more read. Returns whether a read was
        started or has ended.

        Raises TandemError if a read failed. The caller must then give up the pull.
        """
        moved = self._settle_reads(instance)
        if self._sources and len(self.reads) < READS_MAX:
            self._start(instance)
            moved = True
        return moved

    def safe_blocks(self) -> list[int]:
        """Returns the local blocks that no unfinished read of this pull can write."""
        unsafe = {block for read in self.reads for block in read.local_ids}
        return [block for block in self.pull.local_block_ids if block not in unsafe]

    def _settle_reads(self, instance: AgentInstance) -> bool:
        moved = False
        for read in list(self.reads):
            if is_done(instance.agent, read):
                self.reads.remove(read)
                instance.release_later(read.handle)
                moved = True
            elif read.ended:
                raise InternalError(f"a read of KV blocks from {self.pull.peer_id} failed")
        return moved

    def _start(self, instance: AgentInstance) -> None:
        agent = instance.agent
        source = self._sources[0]
        sizes = source.sizes
        first = self._num_started
        end = sizes.end(first, self._piece_size.num_bytes)
        num_bytes = sizes.num_bytes(first, end)
        piece = sizes.indices(first, end)
        target_ids = self._target_ids[piece]
        handle = agent.create_block_read(
            producer_list=source.rank.block_list,
            producer_ids=self._producer_ids[piece],
            local_list=source.target_list,
            local_ids=target_ids,
        )
        self._num_started = end
        if end >= sizes.num_blocks:
            self._sources.pop(0)
            self._num_started = 0
        # A probe has no local block ids.
        local_ids = target_ids.tolist() if self.pull.local_block_ids else []
        read = Read(handle, source.rank.agent_name, local_ids)
        self.reads.append(read)
        read.ended = True  # stays True if `start` raises
        started_at = self._clock()
        state = agent.start(handle)
        took_s = self._clock() - started_at
        self.post_s += took_s
        read.ended = state is ReadState.FAILED
        if state is ReadState.DONE:
            self._piece_size.observe(num_bytes, took_s)
            self.reads.remove(read)
            instance.release_later(handle)
        elif state is ReadState.FAILED:
            raise InternalError(f"the read from {self.pull.peer_id} could not be started")


def is_done(agent: ReadAgent, read: Read) -> bool:
    """Returns whether the read is DONE, so that its handle may be released.

    Sets `read.ended` if the agent reports an error.
    """
    if read.ended:
        return False
    read.ended = True
    state = agent.state(read.handle)
    read.ended = state is ReadState.FAILED
    return state is ReadState.DONE
