"""What rank 0 sends to the other ranks of its engine.

`Settings`, and adapters to load, go through a pipe to each rank, which answers `Loaded`. All other
messages are posted in the shared memory, so that all ranks apply them in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.models.folder import ModelFolder

RankPipe: TypeAlias = "Connection[Any, Any]"
# Runs in a thread of each rank but the first, once the KV pool is allocated. Gets the rank's runner
# and its end of a pipe, whose other end rank 0 has.
RankService: TypeAlias = Callable[[Any, RankPipe], None]


class Settings(NamedTuple):
    """The first message to a rank."""

    folder: ModelFolder
    config: EngineConfig
    rank: int
    memory_fd: int  # memfd of the shared memory
    pool_fd: int  # memfd of the KV pool
    service_fd: int  # descriptor of the pipe of `service`
    service: RankService | None
    tier_memory_fd: int  # memfd through which tiers copy blocks of pools that are apart
    tier_fd: int  # descriptor of the pipe of these copies


class Loaded(NamedTuple):
    """A rank's answer when it has loaded the model or an adapter."""

    error: str = ""


class LoadAdapter(NamedTuple):
    adapter: Adapter


class Measure(NamedTuple):
    """Measure the GPU's memory with steps of at most this number of tokens."""

    step_tokens: int


class Allocate(NamedTuple):
    """Map the KV pool, whose memfd has its size now, or allocate the rank's own pool on its GPU."""

    num_blocks: tuple[int, ...]


class CopyBlocks(NamedTuple):
    """Copy blocks in the rank's own pool: (source block id, target block id, KV group) each."""

    copies: Sequence[tuple[int, int, int]]


class ReadBlocks(NamedTuple):
    """Collect the bytes of whole blocks, of which the rank has some heads in its own pool."""

    block_ids: list[int]


class WriteBlocks(NamedTuple):
    """Copy the rank's heads of whole blocks into its own pool. The bytes follow the message."""

    block_ids: list[int]


class ServeTiers(NamedTuple):
    """Map the memory of the KV tiers, which has so many bytes now, and make the copies that come
    through the pipe."""

    num_bytes: int


class MarkWork(NamedTuple):
    """Record this mark. The copies of tiers that wait for it start after all messages before."""

    number: int


class AddAdapter(NamedTuple):
    digest: str


class DropAdapter(NamedTuple):
    digest: str
