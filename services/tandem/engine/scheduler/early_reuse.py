"""Early reuse: a waiting sequence is not admitted while another sequence computes, loads or pulls
blocks of a prefix that both have. Once these blocks are cached, the waiting sequence reuses them.

    WAITING --the blocks are in the pool--> admitted; reuses the blocks
            `--the other sequence has ended, or the wait was too long--> admitted; computes them

With states, it is not enough that a block is stored: the waiting sequence waits only if the other
one will freeze its states within the common prefix.

No cycle of waits is possible on one worker. A sequence waits only for sequences that hold blocks
(RUNNING, LOADING or awaiting KV from a peer), and a waiting sequence holds none. A cycle over two
workers, which prefill for each other, is not possible either: a sequence that prefills for a peer
does not wait for a sequence that awaits KV from a peer.
"""

import time
from collections.abc import Iterable
from itertools import takewhile

from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.sequence import Sequence, Status
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode


class EarlyReuse:
    def __init__(self, kv: KvCache, tiers: Tiers, wait_max_s: float) -> None:
        """`wait_max_s` is the longest time for which a sequence waits for blocks that other
        sequences compute or pull; 0: it never waits for them. The wait for blocks that are loaded
        from tiers, for another sequence or for a peer, has no limit here."""
        self._kv = kv
        self._tiers = tiers
        self.wait_max_s = wait_max_s
        self.clock = time.monotonic

    def awaits(
        self,
        sequence: Sequence,
        *,
        running: Iterable[Sequence],
        awaiting: Iterable[Sequence],
    ) -> bool:
        """Returns whether a waiting sequence should wait longer, because another sequence or a load
        will provide the first block that the waiting sequence is missing."""
        hashes = sequence.reusable_hashes
        if self._tiers.num_loads and self._tiers.is_loading(hashes, self._kv.match(hashes)):
            return True
        if not self.wait_max_s:
            return False
        depth = self._kv.match(hashes) if self._kv.has_states else 0
        # Sequences of batches are computed last, so other sequences do not wait for them.
        is_batch = sequence.spec.is_batch
        running = (s for s in running if is_batch or not s.spec.is_batch)
        awaiting = (s for s in awaiting if is_batch or not s.spec.is_batch)
        comes = any(_brings_next_of(other, hashes, depth) for other in running)
        if not comes and sequence.mode is not Mode.PREFILL_ONLY:
            comes = any(_pulls_most_of(other, hashes, depth) for other in awaiting)
        if not comes:
            return False
        sequence.shared_since = sequence.shared_since or self.clock()
        return self.clock() - sequence.shared_since < self.wait_max_s

    def end(self, sequence: Sequence) -> None:
        """Ends the wait of a sequence that is now admitted. Does nothing if the sequence did not
        wait."""
        if sequence.shared_since:
            sequence.shared_wait_s += self.clock() - sequence.shared_since
            sequence.shared_since = 0.0


def find_parent(sequence: Sequence, running: Iterable[Sequence], depth: int) -> Sequence | None:
    """Returns a RUNNING sequence from which a waiting sequence can copy a partly filled block (a
    fork). Returns None if there is none. `depth` is the number of cached blocks.

    The parent is the sequence that `fork_of` names. Without `fork_of`, a parent is looked for only
    if the waiting sequence has waited for blocks of another sequence. The copy is safe: no pull
    writes the blocks of a RUNNING sequence, and no sequence is preempted between this call and the
    copy.
    """
    if name := sequence.spec.fork_of:
        return next((s for s in running if s.sequence_id == name), None)
    others = running if sequence.shared_since else ()
    return next((s for s in others if sequence.fork_part(s, depth)), None)


def _brings_next_of(other: Sequence, hashes: list[bytes], depth: int) -> bool:
    """Returns whether a request with the blocks `hashes` can resume where `other` next makes it
    possible, after more than the first `depth` blocks. Then all blocks before this point are common
    to both sequences, because a block's hash covers the blocks before it."""
    comes = _next_depth(other)
    theirs = other.block_hashes
    is_later = depth < comes <= min(len(hashes), len(theirs))
    return is_later and hashes[comes - 1] == theirs[comes - 1]


def _next_depth(other: Sequence) -> int:
    """Returns the number of leading blocks after which requests will be able to resume next,
    because `other` computes or pulls them. With states, this is where its states are frozen, and 0
    if it pulls only its running states."""
    if other.checkpoints is None:
        return other.num_stored_blocks + 1
    if other.status is Status.WAITING_FOR_KV:
        if other.mode is Mode.WAITING_FOR_REMOTE_KV:
            return max(other.num_prefix_blocks, other.tables.checkpoint)
        return other.num_prefix_blocks
    return other.next_checkpoint // other.block_size


def _pulls_most_of(other: Sequence, hashes: list[bytes], depth: int) -> bool:
    """Returns whether it pays to wait for the blocks that `other` pulls.

    All blocks of a pull become usable at the same time, when the last one has arrived. So waiting
    pays only if at least half of the missing blocks are common to both sequences. If one sequence
    is missing 10 blocks and the other 12, at least 6 must be common.
    """
    if not _brings_next_of(other, hashes, depth):
        return False
    num_longer = max(len(hashes), len(other.block_hashes)) - other.num_stored_blocks
    return 2 * _num_to_come(other, hashes) >= num_longer


def _num_to_come(other: Sequence, hashes: list[bytes]) -> int:
    """Returns how many leading blocks `hashes` and `other` have in common, without those that
    `other` has stored already. With states, returns how many of the blocks that `other` pulls come
    before a state."""
    if other.checkpoints is not None:
        return _next_depth(other) - other.num_stored_blocks
    pairs = zip(other.block_hashes, hashes, strict=False)
    return (
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - other.num_stored_blocks
    )
