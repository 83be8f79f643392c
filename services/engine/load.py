"""How busy an engine is, counted from its sequences and its pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from services.engine.block_pool import BlockPool
from services.engine.chains import Chains
from services.engine.sequence import Sequence, Status
from services.engine.types import EngineLoad, Mode


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
    statuses = Counter(s.status for s in sequences)
    num_computing_for_peer = sum(
        s.mode is Mode.FOR_PEER and s.status is Status.RUNNING for s in sequences
    )
    return EngineLoad(
        num_running=statuses[Status.RUNNING] - num_computing_for_peer,
        num_waiting=statuses[Status.WAITING],
        num_awaiting_kv=statuses[Status.AWAITING_KV] + chains.num_adopted,
        num_seats=num_seats,
        chunk_tokens=chunk_tokens,
        num_for_peer=num_computing_for_peer + statuses[Status.HELD] + chains.num_held,
        queued_tokens=sum(s.num_queued_tokens for s in sequences),
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_used=pool.num_used,
        blocks_cached=pool.num_cached,
        blocks_quarantined=pool.num_quarantined,
        tokens_wasted=sum(
            max(0, len(s.block_table) * s.block_size - s.num_tokens)
            for s in sequences
            if s.block_table
        ),
    )
