"""Computes the byte ranges that one tensor-parallel rank reads from a producer.

The degree of a worker is the number of tensor-parallel ranks. Producer and consumer may have
different degrees. Heads are the outermost axis of a block, so the bytes of a head in all layers are
contiguous. So a consumer rank reads one contiguous byte range from a block of a producer rank.

In this example, the model has 4 KV heads. Each row shows which heads the ranks of a worker have:

    KV heads             [ head 0 | head 1 | head 2 | head 3 ]
    producer, degree 2   [ rank 0          | rank 1          ]
    consumer, degree 4   [ rank 0 | rank 1 | rank 2 | rank 3 ]

The consumer's rank 2 needs head 2, so it reads the first half of blocks of the producer's rank 1. A
consumer of degree 1 would read all bytes of both producer ranks. With degree 8, two ranks would
have the same head: ranks 0 and 1 would both have head 0.

This module does no I/O. It computes offsets into pools, not addresses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.errors import Incompatible

# Fields of `ParallelLayout.whole` that must be equal on producer and consumer.
_EQUAL = ("num_kv_heads", "num_layers", "block_size", "head_dim", "dtype", "has_values", "rotated")


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks to read: the peer's block `producer_ids[i]` goes to the local block `local_ids[i]`."""

    producer_ids: Sequence[int]
    local_ids: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.producer_ids) != len(self.local_ids):
            raise ValueError(
                f"{len(self.producer_ids)} producer blocks for {len(self.local_ids)} local blocks; "
                "the numbers must be equal"
            )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The KV layout of one worker's tensor-parallel ranks.

    `whole` is the layout that the pool of a worker with a single rank would have. The pool of each
    rank has the same number of blocks, but only some of the heads. For example, with 8 KV heads and
    degree 4, rank 1 has the heads 2 and 3. With 4 KV heads and degree 8, each rank has one head,
    and ranks 2 and 3 both have head 1. The constructor raises Incompatible if neither the number of
    heads nor the degree divides the other.
    """

    whole: BlockLayout
    degree: int

    def __post_init__(self) -> None:
        heads = self.whole.num_kv_heads
        if self.degree < 1 or (heads % self.degree and self.degree % heads):
            raise Incompatible(f"tensor_parallel {self.degree} does not divide {heads} KV heads")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.whole.num_kv_heads // self.degree)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same heads; 1 if every rank has different heads."""
        return max(1, self.degree // self.whole.num_kv_heads)

    @property
    def rank_layout(self) -> BlockLayout:
        """The layout of each rank's own pool."""
        return replace(self.whole, num_kv_heads=self.heads_per_rank)

    def heads(self, rank: int) -> range:
        """Returns the indices of the model's KV heads that the rank holds."""
        if not 0 <= rank < self.degree:
            raise ValueError(
                f"rank is {rank}; with a tensor-parallel degree of {self.degree} it must be from 0 "
                f"to {self.degree - 1}"
            )
        first = rank * self.whole.num_kv_heads // self.degree
        return range(first, first + self.heads_per_rank)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One contiguous byte range to copy from the pool of a producer rank into the pool of the local
    rank. Each offset counts bytes from the start of its pool.
    """

    producer_offset: int
    local_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankRead:
    """The byte ranges to read from one producer rank, in the order of the blocks."""

    producer_rank: int
    parts: tuple[ShardPart, ...]


def descriptors(
    producer: ParallelLayout, local: ParallelLayout, blocks: BlockPairs, *, local_rank: int
) -> list[RankRead]:
    """Returns the byte ranges that `local_rank` reads from the producer's ranks to fill `blocks`.

    The reads use as few producer ranks as possible. If several producer ranks have the same heads,
    the consumer's ranks are spread over them. The two layouts may differ in the degree and the
    number of blocks. Otherwise raises Incompatible with a message that names every difference.
    """
    _check_alike(producer.whole, local.whole)
    wanted = local.heads(local_rank)
    reads = []
    for group in range(
        wanted.start // producer.heads_per_rank, (wanted.stop - 1) // producer.heads_per_rank + 1
    ):
        producer_rank = group * producer.replicas + local_rank % producer.replicas
        held = producer.heads(producer_rank)
        shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
        parts = _parts(
            producer.rank_layout,
            local.rank_layout,
            blocks,
            producer_head=shared.start - held.start,
            local_head=shared.start - wanted.start,
            num_heads=len(shared),
        )
        reads.append(RankRead(producer_rank, tuple(_merged(parts))))
    return reads


def _parts(
    producer: BlockLayout,
    local: BlockLayout,
    blocks: BlockPairs,
    *,
    producer_head: int,
    local_head: int,
    num_heads: int,
) -> Iterator[ShardPart]:
    head_bytes = producer.head_bytes
    for producer_id, local_id in zip(blocks.producer_ids, blocks.local_ids, strict=True):
        yield ShardPart(
            producer.offset(producer_id) + producer_head * head_bytes,
            local.offset(local_id) + local_head * head_bytes,
            num_heads * head_bytes,
        )


def _merged(parts: Iterator[ShardPart]) -> list[ShardPart]:
    merged: list[ShardPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.producer_offset + last.num_bytes == part.producer_offset
            and last.local_offset + last.num_bytes == part.local_offset
        ):
            merged[-1] = replace(last, num_bytes=last.num_bytes + part.num_bytes)
        else:
            merged.append(part)
    return merged


def _check_alike(producer: BlockLayout, local: BlockLayout) -> None:
    differences = [
        f"{name} is {getattr(producer, name)!r}, not {getattr(local, name)!r}"
        for name in _EQUAL
        if getattr(producer, name) != getattr(local, name)
    ]
    if differences:
        raise Incompatible(
            "this worker cannot read the peer's KV blocks: on the peer, " + "; ".join(differences)
        )
