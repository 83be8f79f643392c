"""Reads KV blocks from peers' pools through an agent (agent.py).

A pull consists of several reads and ends in one of two states:

    event                                                     state of the pull
    all bytes are in place                                    DONE
    error, deadline, cancel, or disconnect of the peer        FAILED

A started read cannot be cancelled. A read that is unfinished when the pull fails is called
abandoned. An abandoned read may still write local memory later, for example when a peer that was
stopped (SIGSTOP) continues. Only destroying the agent surely ends the read. For a pool on a GPU,
this is not enough for NIXL: UCX does not wait for copies over CUDA IPC that the GPU has queued. So
`finish_copies` then waits for the GPU. Peers read this worker's blocks by other means, so they
notice nothing.

The engine may free the local blocks of a DONE pull at any time. After a FAILED pull, the local
blocks of abandoned reads are fenced (fence.py): the engine does not reuse a fenced block until
`unfenced` returns the block. `unfenced` returns the blocks of a read when the read has ended or the
agent was replaced.

A peer may have several ranks with a pool each. The reader then reads from each of them the heads
that its own pool has (tensor_parallel.py). KV groups may differ in their number of heads: a rank
may have a copy of the only KV head, and some of the heads of the states.

The agent is created when it is first needed, and a peer's metadata is loaded when the
peer is first needed. After the agent was replaced (instance.py), all peers are loaded again. Pulls
progress only while `poll` runs.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.common.backoff import Backoff, doubling
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.errors import (
    BadRequest,
    DeadlineExceeded,
    Incompatible,
    QueueFull,
    TandemError,
    WorkerLost,
)
from tandem.transfer.reads.agent import ReadAgent
from tandem.transfer.reads.block_list import BlockList
from tandem.transfer.reads.fence import Fence
from tandem.transfer.reads.instance import AgentInstance, LoadedPeer, logged
from tandem.transfer.reads.messages import (
    LocalPool,
    PeerRank,
    Pull,
    PullResult,
    RemotePool,
    SomeHeads,
)
from tandem.transfer.reads.piece_size import FIRST_BYTES, PIECE_S, PieceSize
from tandem.transfer.reads.pull import (
    EqualSizes,
    MixedSizes,
    PullInPieces,
    Read,
    Source,
    is_done,
)
from tandem.transfer.tensor_parallel import RankRead, rank_reads

log = logging.getLogger(__name__)

# Abandoned reads get this many seconds to end before the agent is replaced. Most of them do. If too
# many blocks are fenced, the agent is replaced without this wait. Replacing it takes 20 ms.
GRACE_S = 0.5
# If a read is still unfinished this many seconds after it was abandoned, new pulls are refused
# until the agent is replaced.
PATIENCE_S = 10.0
# `failure` returns an error message if creating a new agent has failed for this many seconds.
RECOVER_S = 10.0
POLL_S_MIN = 50e-6
POLL_S_MAX = 1e-3
_POLL_FENCED_S = 10e-3  # polling interval if there are abandoned reads but no pulls


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _PeerRank:
    """A rank of a peer: the part of its blocks that is read, and its place in local blocks."""

    metadata: bytes
    blocks: BlockList
    pool_blocks: BlockList  # of the local pool
    scratch_blocks: BlockList
    # For each KV group, the bytes of a block that are read from the rank; 0: none.
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Peer:
    ranks: tuple[_PeerRank, ...]
    num_blocks: int  # of all pools of each rank
    num_first_blocks: int  # of the first pool of each rank


class BlockReader:
    """Reads blocks of peers. Only the transfer thread calls its methods."""

    def __init__(
        self,
        pool: LocalPool,
        make_agent: Callable[[int], ReadAgent],
        *,
        quarantine_blocks_max: int,
        first_piece_bytes: int = FIRST_BYTES,
        poll_s_max: float = POLL_S_MAX,
        delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        finish_copies: Callable[[], object] = _nothing,
    ) -> None:
        """`make_agent` creates an agent; its argument says how many were created before. It raises
        TandemError. While no read ends, the time between two polls grows up to `poll_s_max`.
        `finish_copies` waits until the pool's device has run all copies that it has queued.
        `delay_s` is for tests: a pull becomes DONE at the earliest this many seconds after its
        start."""
        self._pool = pool
        self._spans = pool.own_layout.spans
        # For each KV group, the id after its last block.
        self._group_ends = np.cumsum([num_blocks for num_blocks, _ in self._spans.pools])
        self._scratch_memory: ctypes.Array[ctypes.c_char] | None = None
        address = pool.device_scratch
        if address is None:
            assert pool.memory == "DRAM", "probes of a GPU's pool need scratch memory on the GPU"
            self._scratch_memory = ctypes.create_string_buffer(pool.scratch_bytes)
            address = ctypes.addressof(self._scratch_memory)
        _, size = self._spans.pools[0]
        self._scratch = RemotePool(
            address, pool.scratch_bytes // size, size, pool.device_id, pool.memory
        )
        self._make_agent = make_agent
        self._delay_s = delay_s
        self._clock = clock
        self._finish_copies = finish_copies
        self._instance: AgentInstance | None = None
        self._fence = Fence(
            blocks_max=quarantine_blocks_max, grace_s=GRACE_S, patience_s=PATIENCE_S
        )
        self._peers: dict[str, _Peer] = {}
        self._pulls: dict[str, PullInPieces] = {}
        self._to_reload: list[str] = []  # ids of peers that a new agent has not loaded yet
        self._abandoned: dict[int, Read] = {}  # number of an abandoned read in `_fence` -> read
        self._results: list[PullResult] = []
        self._unfenced: list[int] = []
        self._backoff = Backoff(doubling(POLL_S_MIN, poll_s_max))
        self._backoff_s = 0.0
        self._piece_size = PieceSize(first_piece_bytes)
        # None if the last attempt to create an agent succeeded. Otherwise, for the failures since
        # the last success: (time of the first one, error message of the newest one).
        self._create_failure: tuple[float, str] | None = None

    def connect(self, peer_id: str, ranks: Sequence[PeerRank]) -> None:
        """Loads a peer, so that pulls can read the peer's blocks. `ranks` has the ranks in order.
        Raises TandemError on failure."""
        expected = _block_sizes(self._pool.layout.of_rank(len(ranks)).spans)
        for number, rank in enumerate(ranks):
            if (theirs := _block_sizes(rank.pool.spans)) != expected:
                raise Incompatible(
                    f"rank {number} of {peer_id} has blocks of {theirs} bytes; this worker expects "
                    f"{expected} bytes"
                )
        reads = self._reads(len(ranks))
        first = ranks[0].pool.spans
        peer = _Peer(
            tuple(
                self._peer_rank(rank, len(ranks), of_groups)
                for rank, of_groups in zip(ranks, reads, strict=True)
                if any(read is not None for read in of_groups)
            ),
            num_blocks=first.num_blocks,
            num_first_blocks=first.pools[0][0],
        )
        known = self._peers.get(peer_id)
        if known is not None and known != peer:
            self.disconnect(peer_id)
        self._load(peer)
        self._peers[peer_id] = peer

    def _reads(self, num_ranks: int) -> list[list[RankRead | None]]:
        """Returns what is read from each of a peer's ranks, for each KV group; None: nothing."""
        found: list[list[RankRead | None]] = [[] for _ in range(num_ranks)]
        for group in self._pool.layout.groups:
            theirs, ours = (
                RankHeads(group.layout.num_kv_heads, num)
                for num in (num_ranks, self._pool.num_ranks)
            )
            reads = rank_reads(theirs, ours, local_rank=self._pool.rank)
            by_rank = {read.producer_rank: read for read in reads}
            for rank, of_groups in enumerate(found):
                of_groups.append(by_rank.get(rank))
        return found

    def _peer_rank(
        self, rank: PeerRank, num_ranks: int, reads: Sequence[RankRead | None]
    ) -> _PeerRank:
        theirs, ours, num_bytes = [], [], []
        for group, read in zip(self._pool.layout.groups, reads, strict=True):
            num_heads = group.layout.num_kv_heads
            # The lists have a part of each block, also of those that are not read from this rank.
            their_head, our_head, num = (0, 0, 1) if read is None else read[1:]
            their_num, our_num = (
                RankHeads(num_heads, each).per_rank for each in (num_ranks, self._pool.num_ranks)
            )
            theirs.append(SomeHeads(their_head, their_head + num, their_num, group.num_pieces))
            ours.append(SomeHeads(our_head, our_head + num, our_num, group.num_pieces))
            num_bytes.append(0 if read is None else num * group.layout.block_bytes // num_heads)
        return _PeerRank(
            rank.metadata,
            rank.pool.blocks(theirs),
            self._pool.remote().blocks(ours),
            self._scratch.blocks(ours),
            tuple(
                size // group.num_pieces
                for size, group in zip(num_bytes, self._pool.layout.groups, strict=True)
            ),
        )

    def _load(self, peer: _Peer) -> list[LoadedPeer]:
        instance = self._agent_instance()
        return [instance.load(rank.metadata, rank.blocks) for rank in peer.ranks]

    def probe(self, pull_id: str, peer_id: str, num_blocks: int, deadline_s: float) -> None:
        """Starts a pull of a few blocks into scratch memory, to test that the peer can be read.

        The pull reads `num_blocks` blocks, or fewer if the blocks have more than PROBE_BYTES or the
        peer's pool has fewer blocks. It reads at least one block.
        """
        peer = self._peers.get(peer_id)
        num_peer_blocks = peer.num_first_blocks if peer is not None else 1
        block_ids = list(range(max(1, min(num_blocks, self._scratch.num_blocks, num_peer_blocks))))
        pull = Pull(pull_id, peer_id, block_ids, [], deadline_s)
        try:
            self._begin(pull)
        except TandemError as error:
            self._refuse(pull, error, safe_blocks=[])

    def disconnect(self, peer_id: str) -> None:
        """Forgets a peer. Unfinished pulls from it end FAILED."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        for active in [each for each in self._pulls.values() if each.pull.peer_id == peer_id]:
            self._give_up(active, WorkerLost(f"{peer_id} was disconnected"), "disconnected")
        self._unload_strays()

    def submit(self, pull: Pull) -> None:
        """Starts a pull. `poll` returns exactly one result for each pull."""
        try:
            self._check(pull)
            self._begin(pull)
        except TandemError as error:
            under_way = {
                block for active in self._pulls.values() for block in active.pull.local_block_ids
            }
            under_way |= self._fence.fenced(pull.local_block_ids)
            safe_blocks = [block for block in pull.local_block_ids if block not in under_way]
            self._refuse(pull, error, safe_blocks)

    def poll(self) -> list[PullResult]:
        """Makes progress on pulls and returns the results of the pulls that have ended since the
        last call. Does not wait.

        If abandoned reads did not end in time and no pull is unfinished, replaces the agent.
        """
        if self._instance is not None:
            self._instance.release_ended()
        moved = self._poll_abandoned()
        turn_ends_at = self._clock() + PIECE_S
        for active in list(self._pulls.values()):
            # Move this pull to the end of the dict, so that all pulls get a turn.
            self._pulls[active.pull.pull_id] = self._pulls.pop(active.pull.pull_id)
            moved |= self._advance(active)
            if self._clock() > turn_ends_at:
                break  # commands are handled before the other pulls get a turn
        if self._fence.renewal_due(self._clock(), len(self._pulls)):
            self._unfenced.extend(self.fence())
            self._to_reload = list(self._peers)
        elif self._to_reload:
            self._reload(self._to_reload.pop())
        if moved:
            self._poll_at_once()
        elif self._pulls:
            self._backoff_s = self._backoff.next_s()
        results, self._results = self._results, []
        return results

    def unfenced(self) -> list[int]:
        """Returns the local blocks of FAILED pulls that have become safe since the last call. No
        read can write a safe block any more.

        `poll` returns the result of a FAILED pull before this method returns blocks of the pull.
        """
        block_ids, self._unfenced = self._unfenced, []
        return block_ids

    def wait_s(self) -> float | None:
        """Returns the seconds to wait before the next `poll`.

        None means that no `poll` is needed before the next command.
        """
        ended = self._instance is not None and self._instance.holds_ended
        if self._results or self._unfenced or ended or self._to_reload:
            return 0.0
        if self._pulls:
            return self._backoff_s
        return _POLL_FENCED_S if self._fence.holds_reads else None

    def cancel(self, pull_id: str) -> None:
        """Ends a pull in the state FAILED, unless the pull has already ended."""
        active = self._pulls.get(pull_id)
        if active is not None:
            self._give_up(active, WorkerLost("the pull was cancelled"), "cancelled")

    def fence(self) -> list[int]:
        """Destroys the agent and waits for the device's queued copies, so that no abandoned read
        writes memory any more. Returns the local blocks that were fenced until then.

        Must not be called while a pull is unfinished. The next use of the agent creates a new one.
        If the wait raises an error, the blocks stay fenced.
        """
        assert not self._pulls, "fencing would end the pulls under way"
        if self._instance is not None:
            for read in self._abandoned.values():
                with logged("the handle is freed when the agent is destroyed"):
                    self._instance.agent.release(read.handle)
            self._instance.close()
            self._instance = None
            self._finish_copies()
        self._abandoned.clear()
        block_ids = self._fence.renewed()
        log.info(
            "all abandoned reads were ended; %d KV blocks that were targets of these reads "
            "can be used again",
            len(block_ids),
        )
        return block_ids

    @property
    def num_renewals(self) -> int:
        """Number of times that the agent was replaced to end abandoned reads."""
        return self._fence.instance

    def failure(self) -> str:
        """Returns an error message if the agent was destroyed and creating a new one has failed for
        `RECOVER_S` seconds. Otherwise returns ""."""
        if self._create_failure is None or not self._fence.instance:
            return ""
        since, message = self._create_failure
        failing_s = self._clock() - since
        if failing_s < RECOVER_S:
            return ""
        return f"no new agent could be created for {failing_s:.0f} s: {message}"

    def close(self) -> None:
        """Fails all pulls and destroys the agent. After that, the KV pool's memory may be freed."""
        for active in list(self._pulls.values()):
            self._give_up(active, WorkerLost("this worker is stopping"), "cancelled")
        self._unfenced.extend(self.fence())

    def _check(self, pull: Pull) -> None:
        if pull.pull_id in self._pulls:
            raise BadRequest(f"the pull {pull.pull_id} is already under way")
        if not pull.local_block_ids or len(pull.local_block_ids) != len(pull.producer_block_ids):
            raise BadRequest(
                f"the pull has {len(pull.producer_block_ids)} producer blocks and "
                f"{len(pull.local_block_ids)} local blocks; the numbers must be equal and above 0"
            )
        _check_range(pull.local_block_ids, self._spans.num_blocks)
        if self._fence.refuses(self._clock()):
            raise QueueFull(
                "new pulls are refused for a short time: the reads of failed pulls may still "
                "write to too many KV blocks. These reads are ended as soon as no pull is "
                "running"
            )
        for active in self._pulls.values():
            if not set(active.pull.local_block_ids).isdisjoint(pull.local_block_ids):
                raise BadRequest(
                    f"the new pull is refused: the pull {active.pull.pull_id} is still "
                    "writing to one of the new pull's target blocks"
                )
        if fenced := self._fence.fenced(pull.local_block_ids):
            raise BadRequest(
                f"block {min(fenced)} cannot be the target of a pull yet, because an "
                "abandoned read may still write to this block"
            )

    def _begin(self, pull: Pull) -> None:
        peer = self._peers.get(pull.peer_id)
        if peer is None:
            raise WorkerLost(f"the peer {pull.peer_id} is not connected")
        _check_range(pull.producer_block_ids, peer.num_blocks)
        loaded = self._load(peer)
        instance = self._agent_instance()
        sources = [
            Source(
                rank,
                instance.local_list(
                    each.pool_blocks if pull.local_block_ids else each.scratch_blocks
                ),
                self._sizes(pull, each),
            )
            for rank, each in zip(loaded, peer.ranks, strict=True)
        ]
        self._pulls[pull.pull_id] = PullInPieces(
            pull,
            sources,
            piece_size=self._piece_size,
            clock=self._clock,
        )
        self._poll_at_once()

    def _sizes(self, pull: Pull, rank: _PeerRank) -> EqualSizes | MixedSizes:
        """Returns which of the pull's blocks are read from a rank, and their bytes."""
        # A probe reads blocks of the first group, and one rank may have nothing to read of it.
        if not pull.local_block_ids or len(rank.num_bytes) == 1:
            num_bytes = rank.num_bytes[0]
            return EqualSizes(len(pull.producer_block_ids) if num_bytes else 0, num_bytes)
        groups = np.searchsorted(self._group_ends, pull.local_block_ids, "right")
        return MixedSizes(np.array(rank.num_bytes)[groups])

    def _poll_at_once(self) -> None:
        self._backoff.reset()
        self._backoff_s = 0.0

    def _advance(self, active: PullInPieces) -> bool:
        assert self._instance is not None
        now = self._clock()
        pull = active.pull
        try:
            moved = active.advance(self._instance)
        except TandemError as error:
            self._give_up(active, error, "error")
            if (peer := self._peers.get(pull.peer_id)) is not None:
                # The peer is unloaded, so that the next pull from it connects again.
                for rank in peer.ranks:
                    self._instance.unload(rank.metadata, self._agents_in_use())
            return True
        delay_s = self._delay_s if pull.local_block_ids else 0.0  # probes are not delayed
        if active.is_done and now >= active.started_at + delay_s:
            del self._pulls[pull.pull_id]
            result = PullResult(
                pull.pull_id,
                True,
                active.num_bytes,
                self._clock() - active.started_at,
                post_s=active.post_s,
                num_blocks=len(pull.producer_block_ids),
            )
            self._results.append(result)
            return True
        if now >= active.started_at + pull.deadline_s:
            late = DeadlineExceeded(f"the read did not end within {pull.deadline_s:g} s")
            self._give_up(active, late, "deadline")
            return True
        return moved

    def _give_up(self, active: PullInPieces, error: TandemError, reason: str) -> None:
        del self._pulls[active.pull.pull_id]
        now = self._clock()
        for read in active.reads:
            self._abandoned[self._fence.fail(read.local_ids, now)] = read
        safe_blocks = active.safe_blocks()
        result = PullResult(
            active.pull.pull_id,
            False,
            elapsed_s=now - active.started_at,
            error=error.message,
            reason=reason,
            num_fenced=len(active.pull.local_block_ids) - len(safe_blocks),
        )
        self._results.append(result)
        self._unfenced.extend(safe_blocks)

    def _refuse(self, pull: Pull, error: TandemError, safe_blocks: list[int]) -> None:
        refused = PullResult(pull.pull_id, False, error=error.message, reason="refused")
        self._results.append(refused)
        self._unfenced.extend(safe_blocks)

    def _poll_abandoned(self) -> bool:
        moved = False
        for number, read in list(self._abandoned.items()):
            assert self._instance is not None
            done = False
            with logged("its blocks stay fenced until the agent is replaced"):
                done = is_done(self._instance.agent, read)
            if done:
                self._instance.release_later(read.handle)
                del self._abandoned[number]
                self._unfenced.extend(self._fence.late_done(number))
                moved = True
        if moved:
            self._unload_strays()
        return moved

    def _unload_strays(self) -> None:
        if self._instance is not None:
            wanted = {rank.metadata for peer in self._peers.values() for rank in peer.ranks}
            self._instance.unload_strays(wanted, self._agents_in_use())

    def _agents_in_use(self) -> set[str]:
        return {read.agent_name for read in self._abandoned.values()}

    def _reload(self, peer_id: str) -> None:
        """Loads a peer into a new agent, so that the next pull from the peer can start at once.

        `poll` reloads at most one peer per call, because loading a peer takes some milliseconds.
        """
        if (peer := self._peers.get(peer_id)) is not None:
            with logged(f"the next pull from {peer_id} tries again"):
                self._load(peer)

    def _agent_instance(self) -> AgentInstance:
        if self._instance is None:
            try:
                agent = self._make_agent(self._fence.instance)
                self._instance = AgentInstance(agent, self._pool.remote(), self._scratch)
            except TandemError as error:
                since = self._clock() if self._create_failure is None else self._create_failure[0]
                self._create_failure = since, error.message
                raise
            self._create_failure = None
        return self._instance


def _block_sizes(spans: BlockSpans) -> str:
    return " and ".join(str(size) for _, size in spans.pools)


def _check_range(block_ids: list[int], num_blocks: int) -> None:
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        raise BadRequest(
            f"a block id of the pull is out of range; it must be from 0 to {num_blocks - 1}"
        )
