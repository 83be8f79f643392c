"""Measures the load of an engine, from its queues and its pool."""

from collections.abc import Collection

from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.kept_chains import KeptChains
from tandem.engine.peer_blocks import PeerBlocks
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.sequence import Sequence
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import AdapterLoad, EngineLoad, Mode


def measure_load(
    sequences: Collection[Sequence],
    scheduler: Scheduler,
    peer_blocks: PeerBlocks,
    kv: KvCache,
    adapters: AdapterSlots,
    tiers: Tiers,
    kept: KeptChains,
) -> EngineLoad:
    """A sequence counts once: as waiting, awaiting KV, running, or computed (to be) for a peer.

    A held chain is for a peer; an imported one and one that is LOADING await KV.
    """
    num_running = sum(s.mode is not Mode.PREFILL_ONLY for s in scheduler.running)
    num_waiting = len(scheduler.waiting)
    num_awaiting = len(scheduler.awaiting) + len(scheduler.loading)
    num_imports = peer_blocks.num_imports
    num_prefill_only = len(sequences) - num_running - num_waiting - num_awaiting
    return EngineLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_awaiting_kv=num_awaiting + num_imports,
        num_prefill_only=num_prefill_only + len(peer_blocks) - num_imports,
        num_running_slots=scheduler.num_running_slots,
        chunk_tokens=scheduler.chunk_tokens,
        queued_tokens=sum(s.missing_span[0] for s in sequences),
        queued_s=scheduler.deadlines.queued_s(sequences),
        blocks_total=sum(pool.num_blocks for pool in kv.pools),
        blocks_free=sum(pool.num_free for pool in kv.pools),
        blocks_used=sum(pool.num_used for pool in kv.pools),
        blocks_cached=sum(pool.num_cached for pool in kv.pools),
        blocks_quarantined=kv.num_quarantined - tiers.num_fenced,
        blocks_leaving=sum(pool.num_leaving for pool in kv.pools) + tiers.num_fenced,
        blocks_dropped=sum(pool.num_dropped for pool in kv.pools),
        tokens_wasted=sum(
            max(0, len(s.block_table) * s.block_size - s.num_tokens) for s in sequences
        ),
        groups=kv.group_loads(),
        adapters=_measure_adapters(sequences, adapters),
        tiers=tiers.loads(),
        load_queue_s=tiers.queued_s,
        pins=kept.loads(),
    )


def _measure_adapters(sequences: Collection[Sequence], adapters: AdapterSlots) -> AdapterLoad:
    running: set[str] = set()
    waiting: set[str] = set()
    for sequence in sequences:
        if sequence.spec.adapter is not None:
            names = running if sequence.block_table else waiting
            names.add(sequence.spec.adapter.name)
    return AdapterLoad(sorted(running), sorted(waiting), adapters.loaded, adapters.failed)
