"""The jobs of a tier's threads: to write one block to tiers, and to read a sequence's blocks.

A job holds what it needs until its result is taken: the device's block cannot be handed out while
it is written, nor can the slots of a load. Nobody can stop a job in the middle of a block.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.engine.tiers.storage import BadBlock, Bytes, Entry, Storage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Target:
    """A slot that a block is written to."""

    tier: int
    storage: Storage
    table: list[int]  # slots that are referenced meanwhile; the one to write is the last
    is_mended: bool  # the block is there, and was read badly
    is_written: bool = False


@dataclass(slots=True)
class Write:
    block_id: int
    entry: Entry
    data: Bytes  # of the device's block
    targets: list[Target]
    generation: int  # of the tiers' content
    on_end: Callable[[Write], object]

    def __call__(self) -> None:
        try:
            for target in self.targets:
                try:
                    target.storage.write(target.table[-1], self.entry, self.data)
                    target.is_written = True
                except OSError as error:
                    log.debug("a block is not written to %s: %s", target.storage.name, error)
        finally:
            self.on_end(self)


def write_all(writes: Sequence[Write]) -> None:
    for write in writes:
        write()


@dataclass(slots=True)
class Part:
    """One block of a load."""

    tier: int
    storage: Storage
    slot: int
    block_hash: bytes
    block_id: int
    target: Bytes  # of the device's block


@dataclass(slots=True)
class Load:
    sequence_id: str
    first_block: int  # index of the first part in its chain
    parts: list[Part]
    tables: dict[int, list[int]]  # by tier: slots that are referenced meanwhile
    on_end: Callable[[Load], object]
    clock: Callable[[], float]  # in seconds
    submitted_at: float
    num_read: int = 0  # first parts that are in place
    failed: Part | None = None
    progress_at: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)  # by tier
    is_given_up: bool = False  # its sequence is gone: what is not read yet stays so

    def __call__(self) -> None:
        try:
            for part in self.parts:
                if self.is_given_up:
                    return
                if not self._read(part):
                    return
        finally:
            self.on_end(self)

    @property
    def num_read_by_tier(self) -> dict[str, int]:
        """Blocks that are in place, by the name of the tier that they came from."""
        return dict(Counter(part.storage.name for part in self.parts[: self.num_read]))

    def _read(self, part: Part) -> bool:
        started = self.clock()
        try:
            part.storage.read(part.slot, part.block_hash, part.target)
        except (OSError, BadBlock) as error:
            log.warning("block %d cannot be read from %s: %s", part.slot, part.storage.name, error)
            self.failed = part
            return False
        self.progress_at = self.clock()
        seconds = self.progress_at - started
        self.seconds[part.tier] = self.seconds.get(part.tier, 0.0) + seconds
        self.num_read += 1
        return True
