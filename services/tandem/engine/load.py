"""Measures the load and the state of an engine, from its queues and its pools."""

from collections.abc import Collection

from tandem.common.speculation import SpeculationStats
from tandem.common.worker_load import WorkerLoad
from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.kept_chains import KeptChains
from tandem.engine.peer_blocks import PeerBlocks
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.sequence import Sequence
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import AdapterStats, EngineStats, Mode, PeerLoadStats


def measure_load(
    sequences: Collection[Sequence],
    scheduler: Scheduler,
    peer_blocks: PeerBlocks,
    kv: KvCache,
    tiers: Tiers,
) -> WorkerLoad:
    """Returns the load of an engine, as it is sent to the routers.

    Each sequence, and each held or imported chain of blocks (peer_blocks.py), is counted in one of
    four numbers:

        num_running    RUNNING sequences, except those that this engine prefills for a peer;
                       `num_prefilling` of them have no KV of their whole prompt yet
        num_waiting    WAITING sequences
        num_pulls      sequences that wait for KV from a peer or a tier, and imported chains
        num_leases     other sequences that this engine prefills for a peer, and held chains
    """
    running = [s for s in scheduler.running if s.mode is not Mode.PREFILL_ONLY]
    num_running = len(running)
    num_waiting = len(scheduler.waiting)
    num_awaiting = len(scheduler.awaiting) + len(scheduler.loading)
    num_imports = peer_blocks.num_imports
    # Lines of batches are computed last, so no other prompt waits for theirs.
    queued = [s for s in sequences if not s.spec.is_batch]
    num_prefill_only = len(sequences) - num_running - num_waiting - num_awaiting
    return WorkerLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        queued_tokens=sum(s.missing_span[0] for s in queued),
        queued_s=scheduler.deadlines.queued_s(queued),
        blocks_total=sum(kv.num_usable_blocks),
        blocks_used=sum(pool.num_used for pool in kv.pools),
        blocks_cached=sum(pool.num_cached for pool in kv.pools),
        blocks_quarantined=kv.num_quarantined - tiers.num_fenced,
        num_leases=num_prefill_only + len(peer_blocks) - num_imports,
        num_pulls=num_awaiting + num_imports,
        tokens_wasted=sum(
            max(0, len(s.block_table) * s.block_size - s.num_tokens) for s in sequences
        ),
        num_running_slots=scheduler.num_running_slots,
        chunk_tokens=scheduler.chunk_tokens,
        groups=kv.group_loads(),
        num_prefilling=sum(not s.in_decode for s in running),
        num_lines=sum(s.spec.is_batch for s in running),
    )


def measure_stats(
    sequences: Collection[Sequence],
    kv: KvCache,
    adapters: AdapterSlots,
    tiers: Tiers,
    kept: KeptChains,
    speculation: SpeculationStats | None,
    peer_loads: PeerLoadStats,
) -> EngineStats:
    return EngineStats(
        blocks_free=sum(pool.num_free for pool in kv.pools),
        blocks_leaving=sum(pool.num_leaving for pool in kv.pools) + tiers.num_fenced,
        blocks_dropped=sum(pool.num_dropped for pool in kv.pools),
        adapters=_measure_adapters(sequences, adapters),
        tiers=tiers.stats(),
        load_queue_s=tiers.queued_s,
        pins=kept.stats(),
        speculation=None if speculation is None else speculation.copy(),
        peer_loads=peer_loads,
    )


def _measure_adapters(sequences: Collection[Sequence], adapters: AdapterSlots) -> AdapterStats:
    running: set[str] = set()
    waiting: set[str] = set()
    for sequence in sequences:
        if sequence.spec.adapter is not None:
            names = running if sequence.block_table else waiting
            names.add(sequence.spec.adapter.name)
    return AdapterStats(sorted(running), sorted(waiting), adapters.loaded, adapters.failed)
