"""The KV tiers, the fastest first: places for copies of blocks below a worker's KV pool."""

from dataclasses import dataclass

HOST = "host"
DISK = "disk"
STORE = "store"


@dataclass(frozen=True, slots=True)
class KvTier:
    name: str  # in metrics, in the prefix tree, and in the usage of requests
    option: str  # field of EngineOptions; the tier is on if it is set
    bytes_per_s: float  # assumed speed of a load, until loads were measured
    # True: all workers write to it, so it has no size of its own, and a block that another worker
    # deleted is no damage.
    is_shared: bool = False
    is_sealed: bool = True  # True: --kv-key-file encrypts its blocks


KV_TIERS = (
    KvTier(HOST, "kv_host_bytes", bytes_per_s=2e9, is_sealed=False),
    KvTier(DISK, "kv_disk_path", bytes_per_s=3e8),
    KvTier(STORE, "kv_store_url", bytes_per_s=1e8, is_shared=True),  # an object store
)
SHARED_TIERS = tuple(tier.name for tier in KV_TIERS if tier.is_shared)
