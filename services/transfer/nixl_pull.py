"""One pull on its way over NIXL: pieces that wait, reads under way, and blocks that are in.

    waiting piece --start--> read under way --DONE--> its blocks are in
                                  `--FAILED, or the pull is given up--> its blocks are unsafe

A pull is cut into pieces, so that other pulls and cancels come in between: over CMA the copying
happens inside `start`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.errors import InternalError
from services.transfer.descriptors import BlockPairs, pieces, spans
from services.transfer.nixl_agent import NixlAgent, ReadState
from services.transfer.protocol import Pull, RemotePool

# CMA makes about 6 GB/s, so a piece keeps others waiting for about 3 ms. With half of that
# reads were 1 to 7% slower: each piece has 0.05 ms or more of its own.
PIECE_BYTES_MAX = 16 << 20
READS_MAX = 2  # of one pull: one is under way while the next is started


@dataclass(slots=True, eq=False)
class Read:
    """A started piece. Its handle must be kept until it is DONE or the agent is destroyed."""

    handle: int
    local_ids: list[int]
    ended: bool = False  # NIXL reported an error: no DONE will come, yet bytes may


@dataclass(frozen=True, slots=True)
class Target:
    """Local memory that blocks are read into."""

    address: int
    memory: str
    device_id: int


class NixlPull:
    """`target_ids` are the places in `target`; a probe has those, but no local blocks."""

    def __init__(
        self,
        pull: Pull,
        *,
        peer_id: str,
        peer_agent: str,
        source: RemotePool,
        target: Target,
        target_ids: list[int],
        started_at: float,
    ) -> None:
        self.pull = pull
        self.peer_id = peer_id
        self.peer_agent = peer_agent
        self.started_at = started_at
        self.reads: list[Read] = []
        self._source = source
        self._target = target
        pairs = BlockPairs(pull.source_block_ids, target_ids)
        self._waiting = deque(
            pieces(pairs, block_bytes=source.block_bytes, piece_bytes_max=PIECE_BYTES_MAX)
        )

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self.reads

    @property
    def num_bytes(self) -> int:
        return len(self.pull.source_block_ids) * self._source.block_bytes

    def advance(self, agent: NixlAgent) -> bool:
        """Asks after the reads and starts at most one; whether anything moved.

        Raises TandemError when a read failed; the pull is then to be given up.
        """
        moved = self._settle_reads(agent)
        if self._waiting and len(self.reads) < READS_MAX:
            self._start(agent)
            moved = True
        return moved

    def safe_blocks(self) -> list[int]:
        """Local blocks that no read of this pull may still write."""
        unsafe = {block for read in self.reads for block in read.local_ids}
        return [block for block in self.pull.local_block_ids if block not in unsafe]

    def _settle_reads(self, agent: NixlAgent) -> bool:
        moved = False
        for read in list(self.reads):
            if settled(agent, read):
                self.reads.remove(read)
                moved = True
            elif read.ended:
                raise InternalError(f"NIXL reports an error of the read from {self.peer_id}")
        return moved

    def _start(self, agent: NixlAgent) -> None:
        piece = self._waiting[0]
        source_spans, local_spans = spans(
            piece,
            source_address=self._source.address,
            local_address=self._target.address,
            block_bytes=self._source.block_bytes,
        )
        handle = agent.create_read(
            self.peer_agent,
            source=source_spans,
            source_device=(self._source.memory, self._source.device_id),
            local=local_spans,
            local_device=(self._target.memory, self._target.device_id),
        )
        self._waiting.popleft()
        local_ids = list(piece.local_ids) if self.pull.local_block_ids else []
        read = Read(handle, local_ids)
        self.reads.append(read)
        read.ended = True  # for as long as `start` has not said otherwise: it may raise
        state = agent.start(handle)
        read.ended = state is ReadState.FAILED
        if state is ReadState.DONE:
            self.reads.remove(read)
            agent.release(handle)
        elif state is ReadState.FAILED:
            raise InternalError(f"NIXL could not start the read from {self.peer_id}")


def settled(agent: NixlAgent, read: Read) -> bool:
    """Whether the read is DONE; its handle is released then. Marks a read that ended badly."""
    if read.ended:
        return False
    read.ended = True
    state = agent.state(read.handle)
    read.ended = state is ReadState.FAILED
    if state is ReadState.DONE:
        agent.release(read.handle)
    return state is ReadState.DONE
