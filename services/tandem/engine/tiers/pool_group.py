"""The pool of one KV group above the tiers, with the writes of its blocks that are under way."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.tiers.device_blocks import Channel, DeviceBlocks
from tandem.engine.tiers.jobs import Write

_WRITES_MAX = 64  # in flight


@dataclass(slots=True)
class PoolGroup:
    """The pool of one KV group, and how threads reach its blocks."""

    number: int
    pool: BlockPool
    blocks: DeviceBlocks
    channels_out: list[Channel]  # of the writers, by tier
    channels_in: list[Channel]  # of the readers
    writes: dict[int, Write] = field(default_factory=dict)  # in flight, by the device's block
    writes_max: int = field(init=False)

    def __post_init__(self) -> None:
        self.writes_max = max(1, min(_WRITES_MAX, self.pool.num_blocks // 8))

    def wants_writes(self, hung: Set[int]) -> bool:
        """Returns whether a further write may begin; those that only wait for tiers that hang keep
        none from it."""
        if not self.pool.has_unwritten:
            return False
        num_writes = len(self.writes)
        if hung:
            num_writes = sum(not write.awaits <= hung for write in self.writes.values())
        return num_writes < self.writes_max
