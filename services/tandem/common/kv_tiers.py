"""The KV tiers, the fastest first. A tier stores copies of blocks outside a worker's KV pool."""

from dataclasses import dataclass

HOST = "host"
DISK = "disk"
STORE = "store"


@dataclass(frozen=True, slots=True)
class KvTier:
    name: str  # name in metrics, in the prefix tree, and in the usage of requests
    option: str  # name of the field of EngineOptions that switches the tier on
    # Speed of loads that is assumed before the first load was measured. Choose that of the slowest
    # device on which the tier is of use: with too high a value, the first prompts wait for loads
    # that take longer than computing.
    bytes_per_s: float
    # True: all workers share the tier. The tier then has no size limit, and a missing block does
    # not count as damaged, because another worker may have deleted it.
    is_shared: bool = False
    is_sealed: bool = False  # True: the tier encrypts blocks with the key in --kv-key-file.
    # True: the option names a folder. The worker watches its disk, and no other tier may have it.
    is_folder: bool = False


KV_TIERS = (
    KvTier(HOST, "kv_host_bytes", bytes_per_s=2e9),
    KvTier(DISK, "kv_disk_path", bytes_per_s=3e8, is_sealed=True, is_folder=True),
    KvTier(STORE, "kv_store_url", bytes_per_s=1e8, is_shared=True, is_sealed=True),
)
# Blocks that a worker has loaded from tiers for peers take at most this part of its KV pool, until
# the peers have them.
PEER_SHARE_MAX = 0.5
SHARED_TIERS = tuple(tier.name for tier in KV_TIERS if tier.is_shared)
