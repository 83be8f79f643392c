"""Measures the load of an engine, from its sequences and its pool."""

from collections.abc import Collection

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.peer_blocks import PeerBlocks
from tandem.engine.sequence import Sequence, Status
from tandem.engine.types import EngineLoad, Mode


def measure_load(
    sequences: Collection[Sequence],
    peer_blocks: PeerBlocks,
    pool: BlockPool,
    *,
    num_running_slots: int,
    chunk_tokens: int,
) -> EngineLoad:
    """A sequence counts once: as waiting, awaiting KV, running, or computed (to be) for a peer.

    A held chain is for a peer, an imported one awaits KV.
    """
    running = waiting = awaiting_kv = prefilling_only = held = queued_tokens = wasted = 0
    for sequence in sequences:  # once: this is part of every step
        status = sequence.status
        if status is Status.RUNNING:
            if sequence.mode is Mode.PREFILL_ONLY:
                prefilling_only += 1
            else:
                running += 1
        elif status is Status.WAITING:
            waiting += 1
        elif status is Status.WAITING_FOR_KV:
            awaiting_kv += 1
        elif status is Status.HELD:
            held += 1
        queued_tokens += sequence.num_queued_tokens
        if sequence.block_table:
            room = len(sequence.block_table) * sequence.block_size
            wasted += max(0, room - sequence.num_tokens)
    return EngineLoad(
        num_running=running,
        num_waiting=waiting,
        num_awaiting_kv=awaiting_kv + peer_blocks.num_imports,
        num_running_slots=num_running_slots,
        chunk_tokens=chunk_tokens,
        num_prefill_only=prefilling_only + held + peer_blocks.num_pinned,
        queued_tokens=queued_tokens,
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached,
        blocks_quarantined=pool.num_quarantined,
        tokens_wasted=wasted,
    )
