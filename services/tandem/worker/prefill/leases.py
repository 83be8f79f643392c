"""The open leases of a producer and the limits on them. This module does no I/O.

A lease is *ahead* if all its blocks are computed, but its consumer has not read and released them
yet. The blocks of all leases that are ahead may fill at most a fraction of the pool
(`leased_blocks_max_share`). While they fill more, new leases are refused. For example, a pool has
1000 blocks, and the fraction is 0.9. A new lease is refused while more than 900 blocks wait to be
read. The refused consumer then uses another producer or computes locally.

A lease whose sequence waits in the engine's queue has no blocks yet. The number of such leases is
limited by the size of that queue.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.common.config.transfer import TransferConfig
from tandem.net.observability.traces import NO_SPAN, RequestSpan
from tandem.worker.prefill.prefix_choice import PrefixPlan


@dataclass(slots=True, eq=False)
class Lease:
    """The state of one lease, under which a consumer reads the blocks of one sequence, or one chain
    of cached blocks.
    """

    lease_id: str
    consumer_id: str
    transport: str = "grpc"  # transport by which the consumer reads: "cuda_ipc", "nixl" or "grpc"
    verify_every: int = 0
    is_hold: bool = False  # True: the lease holds a chain of cached blocks, and nothing is computed
    span: RequestSpan = NO_SPAN
    # Times are `time.monotonic()` seconds; 0 means not reached yet.
    opened_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    # part of the time before admission in which the sequence waited for blocks that other sequences
    # computed, in seconds
    shared_wait_s: float = 0.0
    # number of prompt tokens that the engine had to compute when the sequence arrived
    tokens_ahead: int = 0
    prefilled_at: float = 0.0
    # The engine's events for this lease, and the consumer's release. The queue has no maximum size,
    # because a prompt causes at most a few events per block.
    events: asyncio.Queue[object] = field(default_factory=asyncio.Queue)
    block_ids: list[int] = field(default_factory=list)  # blocks that were announced to the consumer
    is_ahead: bool = False
    # plan for pulling the prompt's first blocks from a holder after admission; None: no pull
    plan: PrefixPlan | None = None
    prefix: asyncio.Task[None] | None = None  # the task that carries out `plan`

    @property
    def stage(self) -> str:
        """The current stage of the lease, as shown in the log of a drain."""
        if self.is_ahead:
            return "read by its consumer"
        return "computed" if self.admitted_at else "queued"

    @property
    def queue_s(self) -> float:
        return max(0.0, self.admitted_at - self.opened_at)

    def end_span(self, now: float, outcome: str) -> None:
        """Ends the trace span and adds the stages that were reached."""
        self.span.stage("queue", self.opened_at, self.admitted_at)
        self.span.stage("prefill", self.admitted_at, self.prefilled_at)
        self.span.stage("transfer", self.prefilled_at, now)
        self.span.end({"tandem.outcome": outcome, "tandem.blocks": len(self.block_ids)})


class Leases:
    """All open leases of one producer, by id."""

    def __init__(self, config: TransferConfig, *, num_blocks: int) -> None:
        """`num_blocks` is the size of the whole pool."""
        self._config = config
        self._ahead_max = int(config.leased_blocks_max_share * num_blocks)
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def lent(self, lease_id: str) -> list[int] | None:
        """Returns the ids of the blocks that were announced to the lease's consumer.

        Returns None if the lease is not open.
        """
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.block_ids

    @property
    def num_blocks_ahead(self) -> int:
        return sum(len(lease.block_ids) for lease in self if lease.is_ahead)

    def refusal(self, consumer_id: str) -> str:
        """Returns why this consumer gets no lease now; "" if it may open a lease."""
        if len(self) >= self._config.leases_max:
            return f"{len(self)} leases are open on this worker, which is the limit"
        of_consumer = sum(lease.consumer_id == consumer_id for lease in self)
        if of_consumer >= self._config.leases_per_consumer_max:
            return (
                f"{of_consumer} leases are open for {consumer_id}, which is the limit for one "
                "consumer"
            )
        if (ahead := self.num_blocks_ahead) > self._ahead_max:
            return (
                f"{ahead} finished blocks wait for their consumers; the limit is {self._ahead_max}"
            )
        return ""

    def open(self, lease: Lease) -> None:
        assert lease.lease_id not in self._leases
        self._leases[lease.lease_id] = lease

    def close(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
