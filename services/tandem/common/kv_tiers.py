"""The KV tiers, the fastest first. A tier stores copies of blocks outside a worker's KV pool."""

from dataclasses import dataclass

HOST = "host"
DISK = "disk"
STORE = "store"


@dataclass(frozen=True, slots=True)
class KvTier:
    name: str  # name in metrics, in the prefix tree, and in the usage of requests
    option: str  # field of EngineOptions; the tier is used if this field is set
    bytes_per_s: float  # assumed speed of loads until the first load was measured


KV_TIERS = (
    KvTier(HOST, "kv_host_bytes", bytes_per_s=2e9),
    KvTier(DISK, "kv_disk_path", bytes_per_s=3e8),
    KvTier(STORE, "kv_store_url", bytes_per_s=1e8),  # an object store, which all workers share
)
