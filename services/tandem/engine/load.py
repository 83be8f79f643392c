"""How busy an engine is, counted from its sequences and its pool."""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.chains import Chains
from tandem.engine.sequence import Sequence, Status
from tandem.engine.types import EngineLoad, Mode


def measure_load(
    sequences: Collection[Sequence],
    chains: Chains,
    pool: BlockPool,
    *,
    num_seats: int,
    chunk_tokens: int,
) -> EngineLoad:
    """A sequence counts once: as waiting, awaiting KV, running, or computed (to be) for a peer.

    A held chain is for a peer, an adopted one awaits KV.
    """
    running = waiting = awaiting_kv = computing_for_peer = held = queued_tokens = wasted = 0
    for sequence in sequences:  # once: this is part of every step
        status = sequence.status
        if status is Status.RUNNING:
            if sequence.mode is Mode.FOR_PEER:
                computing_for_peer += 1
            else:
                running += 1
        elif status is Status.WAITING:
            waiting += 1
        elif status is Status.AWAITING_KV:
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
        num_awaiting_kv=awaiting_kv + chains.num_adopted,
        num_seats=num_seats,
        chunk_tokens=chunk_tokens,
        num_for_peer=computing_for_peer + held + chains.num_held,
        queued_tokens=queued_tokens,
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached,
        blocks_quarantined=pool.num_quarantined,
        tokens_wasted=wasted,
    )
