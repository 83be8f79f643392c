"""Computes which heads one tensor-parallel rank reads from each rank of a producer.

Producer and consumer may have different numbers of ranks. Heads are the outermost axis of a block,
so neighbouring heads of a block are contiguous bytes. So a consumer rank reads one contiguous byte
range from each block of a producer rank.

In this example, the model has 4 KV heads. Each row shows which heads the ranks of a worker have:

    KV heads             [ head 0 | head 1 | head 2 | head 3 ]
    producer, 2 ranks    [ rank 0          | rank 1          ]
    consumer, 4 ranks    [ rank 0 | rank 1 | rank 2 | rank 3 ]

The consumer's rank 2 needs head 2, so it reads the first half of blocks of the producer's rank 1. A
consumer with 1 rank would read all bytes of both producer ranks. This module does no I/O.
"""

from typing import NamedTuple

from tandem.engine.cache.layout.rank_heads import RankHeads


class RankRead(NamedTuple):
    """The heads to read from one producer rank."""

    producer_rank: int
    producer_head: int  # the first of these heads among those of the producer rank
    local_head: int  # the first of these heads among those of the local rank
    num_heads: int


def rank_reads(producer: RankHeads, local: RankHeads, *, local_rank: int) -> list[RankRead]:
    """Returns the reads that give `local_rank` all of its heads.

    The reads use as few producer ranks as possible. If several producer ranks have the same heads,
    the consumer's ranks are spread over them. Both sides must have the same number of heads.
    """
    wanted = local.of(local_rank)
    reads = []
    first, last = wanted.start // producer.per_rank, (wanted.stop - 1) // producer.per_rank
    for group in range(first, last + 1):
        producer_rank = group * producer.replicas + local_rank % producer.replicas
        held = producer.of(producer_rank)
        shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
        reads.append(
            RankRead(
                producer_rank,
                producer_head=shared.start - held.start,
                local_head=shared.start - wanted.start,
                num_heads=len(shared),
            )
        )
    return reads
