"""Makes the tiers that an engine's settings ask for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tandem.config.engine import EngineConfig
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.tiers.disk_storage import DiskStorage
from tandem.engine.tiers.host_storage import HostStorage
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.keep_policy import keep_policy
from tandem.engine.tiers.object_storage import ObjectStorage
from tandem.engine.tiers.seal import make_seal
from tandem.engine.tiers.storage import Storage
from tandem.engine.tiers.store_client import open_store
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers
from tandem.errors import ConfigError


def make_tiers(
    config: EngineConfig,
    kv: KvCache,
    memory: torch.Tensor,
    identity: str,
    start_thread: Callable[[str], JobThread] = IoThread,
) -> Tiers:
    """`memory` has all pools; `identity` names what the KV is computed with.

    Raises ConfigError for what tiers cannot do yet.
    """
    pool, layout = kv.pools[0], kv.layout
    if not config.has_tiers:
        return Tiers(pool, np.empty((0, 0), np.uint8), [], start_thread)
    if layout.has_windows or len(layout.groups) > 1:
        raise ConfigError(
            "kv-host-memory, kv-disk-path and kv-store-url are not for models with sliding "
            "windows yet"
        )
    if memory.device.type != "cpu":
        raise ConfigError(
            "kv-host-memory, kv-disk-path and kv-store-url are for --device cpu only so far"
        )
    storages: list[Storage] = []
    if config.kv_host_bytes:
        num_slots = config.kv_host_bytes // layout.block_bytes
        if not num_slots:
            raise ConfigError(
                f"kv-host-memory is {config.kv_host_bytes}; it must be at least "
                f"{layout.block_bytes} for one block"
            )
        storages.append(HostStorage(num_slots=num_slots, block_bytes=layout.block_bytes))
    identity = f"{identity} {layout.describe()}"
    seal = make_seal(config.kv_key_file, identity)
    if config.kv_disk_path:
        storages.append(
            DiskStorage(
                Path(config.kv_disk_path).expanduser(),
                bytes_max=config.kv_disk_bytes,
                block_bytes=layout.block_bytes,
                identity=identity,
                seal=seal,
            )
        )
    if config.kv_store_url:
        storages.append(
            ObjectStorage(
                open_store(config), place=config.kv_store_url, identity=identity, seal=seal
            )
        )
    tiers = [
        Tier(number, each, keep_policy(config.kv_tier_policy, each.num_slots, layout.block_size))
        for number, each in enumerate(storages)
    ]
    rows = memory.view(-1).view(torch.uint8).numpy().reshape(-1, layout.block_bytes)
    return Tiers(pool, rows, tiers, start_thread)
