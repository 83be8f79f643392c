"""Creates the tiers of an engine from its settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.kv_tiers import DISK, HOST, KV_TIERS, STORE
from tandem.common.options import option_name
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout, checkpoint_interval
from tandem.engine.tiers.device.blocks import BlocksInPlace, DeviceBlocks
from tandem.engine.tiers.device.cuda import CudaDevice
from tandem.engine.tiers.device.staged_blocks import StagedBlocks
from tandem.engine.tiers.disk.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.object_store.storage import REQUEST_S, ObjectStorage
from tandem.engine.tiers.seal import Seal, make_seal
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.storage import Storage
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers
from tandem.errors import ConfigError
from tandem.net.object_store import StoreAddress, open_store

CHAIN_TOKENS = 8192  # a typical length of a conversation or a document


@dataclass(frozen=True, slots=True)
class TierInputs:
    """Arguments of the functions in `STORAGES`, which create the storages of a tier. `blocks`,
    `identities` and `seals` have one item for each KV group."""

    config: EngineConfig
    layout: KvLayout
    blocks: Sequence[DeviceBlocks]  # the blocks of the KV pools
    identities: Sequence[str]  # texts that name everything on which a group's KV depends
    seals: Sequence[Seal]


def make_tiers(
    config: EngineConfig,
    kv: KvCache,
    memory: torch.Tensor,
    identity: str,
    start_thread: Callable[[str], JobThread] = IoThread,
    rank_blocks: Callable[[EngineConfig], Sequence[DeviceBlocks]] | None = None,
) -> Tiers:
    """Returns the tiers of an engine.

    `memory` holds all KV pools, in any shape and dtype. `identity` names everything on which the KV
    depends. If each of several ranks has a KV pool with its own heads, `memory` is not used, and
    `rank_blocks` returns the blocks of each KV group. Raises ConfigError for settings that tiers do
    not support.
    """
    layout = kv.layout
    if not config.has_tiers:
        none = [BlocksInPlace(np.empty((0, 0), np.uint8)) for _ in kv.pools]
        return Tiers(kv.pools, layout, none, [], start_thread, unquarantine=kv.unquarantine)
    if rank_blocks is not None:
        blocks = rank_blocks(config)
    else:
        pools = torch.split(memory.view(-1).view(torch.uint8), _pool_bytes(layout))
        blocks = [
            device_blocks(pool.view(-1, group.layout.block_bytes))
            for pool, group in zip(pools, layout.groups, strict=True)
        ]
    identity = f"{identity} {layout.describe()}"
    names = [f"{identity} group {n}" if n else identity for n in range(len(layout.groups))]
    seals = [make_seal(config.kv_key_file, name) for name in names]
    inputs = TierInputs(config, layout, blocks, names, seals)
    tiers = []
    for number, name in enumerate(config.tiers):
        storages = STORAGES[name](inputs)
        num_slots = sum(storage.num_slots for storage in storages)
        policy = keep_policy(config.kv_tier_policy, num_slots, layout.block_size)
        tiers.append(Tier(number, storages, policy, layout))
    return Tiers(kv.pools, layout, blocks, tiers, start_thread, unquarantine=kv.unquarantine)


def _host_storages(inputs: TierInputs) -> list[Storage]:
    layout = inputs.layout
    sizes = [group.layout.block_bytes for group in layout.groups]
    parts = _divide("kv-host-memory", inputs.config.kv_host_bytes, layout, sizes)
    return [
        HostStorage(of_group.host_pages(part // size * size), block_bytes=size)
        for part, size, of_group in zip(parts, sizes, inputs.blocks, strict=True)
    ]


def _disk_storages(inputs: TierInputs) -> list[Storage]:
    return _storages_in_files(DISK, "kv-disk-size", inputs.config.kv_disk_bytes, inputs)


def _storages_in_files(
    name: str, size_option: str, num_bytes: int, inputs: TierInputs
) -> list[Storage]:
    """Returns the storages of a tier in files: `num_bytes` in the folder that the tier's option
    names. Errors name `size_option` if this is not enough."""
    layout = inputs.layout
    option = next(tier.option for tier in KV_TIERS if tier.name == name)
    sizes = [group.layout.block_bytes for group in layout.groups]
    slots = [RECORD_BYTES + inputs.seals[0].num_extra_bytes + size for size in sizes]
    parts = _divide(size_option, num_bytes, layout, slots, HEADER_BYTES * len(layout.groups))
    storages: list[DiskStorage] = []
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        storages.append(
            DiskStorage(
                inputs.config.tier_folders[option],
                bytes_max=HEADER_BYTES + part,
                block_bytes=size,
                identity=inputs.identities[number],
                seal=inputs.seals[number],
                group=number,
                folder=storages[0].folder if storages else None,
                name=name,
                option=option_name(option),
            )
        )
    return list(storages)


def _store_storages(inputs: TierInputs) -> list[Storage]:
    config = inputs.config
    address = StoreAddress(
        "kv-store",
        config.kv_store_url,
        config.kv_store_endpoint,
        config.kv_store_region,
        config.kv_store_credentials,
    )
    first = ObjectStorage(
        open_store(address, request_s=REQUEST_S),
        place=config.kv_store_url,
        identity=inputs.identities[0],
        seal=inputs.seals[0],
    )
    others = [first.of_group(n, seal) for n, seal in enumerate(inputs.seals) if n]
    return [first, *others]


# For each tier in KV_TIERS: the function that creates the tier's storages, one for each KV group.
STORAGES: dict[str, Callable[[TierInputs], list[Storage]]] = {
    HOST: _host_storages,
    DISK: _disk_storages,
    STORE: _store_storages,
}


def _divide(
    option: str, given: int, layout: KvLayout, slots: Sequence[int], fixed: int = 0
) -> list[int]:
    """Divides the `given` bytes of a tier, without `fixed` bytes of overhead, among the KV groups.
    `slots` has the bytes of one slot in each group.

    Each group gets bytes in proportion to the blocks that it stores for a chain of `CHAIN_TOKENS`
    tokens. A group without a window stores the whole chain. A group with a window stores the blocks
    for two requests: one resumes after the prompt, the other after the end of the chain. A group
    with states also stores those within the chain. Raises ConfigError if a group would have no
    slot.
    """
    chain = layout.blocks_of(CHAIN_TOKENS)

    def blocks_of(group: KvGroup) -> int:
        num_within = 0
        if group.has_states:
            num_within = CHAIN_TOKENS // checkpoint_interval(group, layout.without_states)
        return min(chain, 2 * (group.decode_blocks or chain) + num_within)

    needs = [blocks_of(group) * slot for group, slot in zip(layout.groups, slots, strict=True)]
    parts = [max(0, given - fixed) * need // sum(needs) for need in needs]
    if any(part < slot for part, slot in zip(parts, slots, strict=True)):
        pairs = zip(needs, slots, strict=True)
        least = fixed + max(-(-slot * sum(needs) // need) for need, slot in pairs)
        raise ConfigError(
            f"{option} is {given}; it must be at least {least} bytes, so that one block fits"
        )
    return parts


def _pool_bytes(layout: KvLayout) -> list[int]:
    return [group.layout.pool_bytes for group in layout.groups]


def device_blocks(rows: torch.Tensor) -> DeviceBlocks:
    """Returns the object through which tier threads copy the blocks of a pool. `rows` is the pool,
    uint8 [num_blocks, block_bytes]."""
    if rows.device.type == "cpu":
        return BlocksInPlace(rows.numpy())
    return StagedBlocks(rows, CudaDevice(rows.device))
