"""The consumer's side of one lease: a `Prefill` stream and the pulls that it protects.

    1. The consumer opens the stream.
    2. For each event `run`, the consumer pulls the run's blocks. If the option `overlap` is off,
       these pulls start only after step 4.
    3. When every pull has succeeded, the consumer sends `release`.
    4. The event `prefilled` or `held` arrives, before or after step 3. No `run` follows it.
    5. The event `released` arrives after steps 3 and 4. The pulled blocks are now valid.

If the stream ends before step 5, the lease is lost (LeaseLost).

The lease lives as long as the stream. When the method `run` or `hold` ends, the stream closes, and
the producer frees the blocks of the lease. Both methods return only after an event `released` that
has the producer's epoch and the lease's id, and confirms that all blocks were held. Before that
event, pulled blocks are not valid.

All pulls may have succeeded before the producer samples the first token. The consumer then sends
`release` early. After the first token it waits only for `released`, and not for pulls.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.config.worker import WorkerConfig
from tandem.common.prompt_image import with_flags
from tandem.engine.types import SequenceSpec
from tandem.errors import LeaseLost, Overloaded, WorkerLost
from tandem.net.rpc.convert import cached_of, to_message
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.kv_pulls.lease_stream import LeaseStream, open_stream
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates

# If the deadline of the first token has passed, this time limit in seconds is sent to the producer,
# because 0 would mean that there is no deadline.
_FIRST_TOKEN_MIN_S = 1e-3


@dataclass(slots=True)
class PullStats:
    """Counts and timings of one lease. Times are time.monotonic() seconds; 0 means not reached."""

    num_blocks: int = 0
    # how many leading blocks of the prompt were not pulled, because this worker had them cached
    num_skipped: int = 0
    num_bytes: int = 0
    queue_s: float = 0.0  # seconds that the sequence waited in the producer's queue
    # the part of `queue_s` in which the sequence waited for blocks that other sequences computed
    shared_wait_s: float = 0.0
    # number of prompt tokens that the producer had to compute when the sequence arrived there
    tokens_ahead: int = 0
    pull_s: float = 0.0  # sum of the durations of all pulls, which may overlap
    began_at: float = 0.0  # start of the first pull
    prefilled_at: float = 0.0  # arrival of the first token
    released_at: float = 0.0
    cached: CachedTokens = NONE_CACHED  # tokens of the prompt that were cached on the producer

    @property
    def exposed_s(self) -> float:
        """Seconds between the first token and the start of decode."""
        return self.released_at - self.prefilled_at


class ConsumerLease:
    """One attempt to obtain blocks from `peer`.

    The method `run` makes the peer prefill a prompt. The method `hold` makes the peer keep a chain
    of blocks that it has cached. Only one of them is called, and once.
    """

    def __init__(self, peer: Peer, *, puller: Puller, rates: Rates, config: WorkerConfig) -> None:
        self.peer = peer
        self._puller = puller
        self._rates = rates
        self._config = config
        self._lease_id = uuid.uuid4().hex
        self._epoch = ""
        self._sequence_id = ""
        # ids of the local blocks to fill, from the first missing block on
        self._targets: list[int] = []
        # Index of the first block to pull, in the transfer order (docs/transfer.md). If no layer
        # has an attention window, the transfer order is the order of the blocks in the prompt.
        self._first_block = 0
        self._next_block = 0
        # index after the last block to pull, in the transfer order; None until it is known
        self._end_block: int | None = None
        # True after the event `prefilled` or `held`. No block is computed after that.
        self._is_answered = False
        self._is_release_sent = False
        self._may_pull = asyncio.Event()
        if config.transfer.overlap:
            self._may_pull.set()
        self.stats = PullStats()
        # For each block of the prompt: the sum of the attention weights on the keys of the block.
        # Empty unless the KV budget keeps heavy hitters.
        self.block_sums: list[float] = []
        self.pulled_anything = False
        self._on_begun: Callable[[], None] = lambda: None

    async def run(
        self,
        spec: SequenceSpec,
        *,
        request_id: str,
        first_missing_block: int,
        targets: list[int],
        prefix_holders: Sequence[pb.PrefixHolder] = (),
        trace: Mapping[str, str] | None = None,
        is_silent: Callable[[], bool] = lambda: False,
        on_begun: Callable[[], None] = lambda: None,
        on_first_token: Callable[[pb.Prefilled, PullStats], None],
    ) -> int:
        """Makes the peer prefill the prompt and pulls every missing block into `targets`.

        `targets` has the ids of the local blocks to fill, in the transfer order (docs/transfer.md).
        `trace` has the headers of the request's trace span. `is_silent` returns whether the
        producer's record in Redis is overdue. `on_begun` is called for each run of blocks that the
        peer has computed. From the first one on, the peer does not refuse the prompt. Returns the
        id of the first token. Raises TandemError.
        """
        # The lease id contains the request id, so that the producer logs the request id, too.
        self._lease_id = f"{request_id}#{self._lease_id}"
        start = pb.StartPrefill(
            lease_id=self._lease_id,
            request_id=request_id,
            input=to_message(
                pb.SequenceInput, spec, token_ids=with_flags(spec.token_ids, spec.images)
            ),
            first_missing_block=first_missing_block,
            consumer_worker_id=self._config.worker_id,
            transport=self.peer.transport,
            prefix_holders=prefix_holders,
            verify_every=self._config.transfer.verify_every,
            trace=pb.TraceContext(**trace) if trace else None,
        )
        if spec.first_token_by:
            start.sent_at_s = time.monotonic()
            start.first_token_s = max(_FIRST_TOKEN_MIN_S, spec.first_token_by - time.monotonic())
        if (rate := self._rates.pair(self.peer.worker_id, self.peer.transport)) is not None:
            start.rate.CopyFrom(to_message(pb.PairRate, rate))
        self._end_block = first_missing_block + len(targets)
        first_token_id = -1

        def on_event(event: pb.PrefillEvent) -> None:
            nonlocal first_token_id
            if event.WhichOneof("event") != "prefilled":
                raise LeaseLost(f"{self.peer.worker_id} sent an unexpected event: {event}")
            self.stats.prefilled_at = time.monotonic()
            self.stats.cached = cached_of(event.prefilled)
            self.stats.queue_s = event.prefilled.queue_ms / 1000
            self.stats.shared_wait_s = event.prefilled.shared_wait_ms / 1000
            self.stats.tokens_ahead = event.prefilled.tokens_ahead
            self.block_sums = list(event.prefilled.block_sums)
            first_token_id = int(event.prefilled.first_token_id)
            on_first_token(event.prefilled, self.stats)

        self._on_begun = on_begun
        self._pull_into(spec.sequence_id, first_missing_block, targets)
        await self._follow(pb.PrefillCommand(start=start), on_event, is_silent)
        return first_token_id

    async def hold(
        self,
        sequence_id: str,
        block_hashes: list[bytes],
        *,
        first_missing_block: int,
        targets: list[int],
        load_s_max: float = 0.0,
    ) -> int:
        """Pulls a chain of blocks into `targets`, as far as the producer has the chain cached.

        The producer first loads blocks from its tiers, if it expects this to take at most
        `load_s_max` seconds. The pull begins at the first missing block. Returns the number of the
        chain's leading blocks that the producer has. Raises TandemError.
        """
        hold = pb.HoldBlocks(
            lease_id=self._lease_id,
            block_hashes=block_hashes,
            first_missing_block=first_missing_block,
            consumer_worker_id=self._config.worker_id,
            transport=self.peer.transport,
            verify_every=self._config.transfer.verify_every,
            load_s_max=load_s_max,
        )
        num_held = 0

        def on_event(event: pb.PrefillEvent) -> None:
            nonlocal num_held
            num_held = event.held.num_blocks
            if event.WhichOneof("event") != "held" or num_held > len(block_hashes):
                raise LeaseLost(f"{self.peer.worker_id} sent an unexpected event: {event}")
            # If the producer holds the whole chain, all targets are filled. If it holds only the
            # first 3 of 5 blocks, the last block to pull is the third one. A chain of a model with
            # attention windows is never held in part.
            is_whole = num_held == len(block_hashes)
            self._end_block = (
                first_missing_block + len(targets)
                if is_whole
                else max(first_missing_block, num_held)
            )

        self._pull_into(sequence_id, first_missing_block, targets)
        await self._follow(pb.PrefillCommand(hold=hold), on_event)
        return num_held

    def _pull_into(self, sequence_id: str, first_block: int, targets: list[int]) -> None:
        self._sequence_id = sequence_id
        self._targets = targets
        self._first_block = self._next_block = self.stats.num_skipped = first_block

    async def _follow(
        self,
        opening: pb.PrefillCommand,
        on_answer: Callable[[pb.PrefillEvent], None],
        is_silent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reads events until `released`, which must confirm that all blocks were held."""
        async with (
            open_stream(self.peer, self._config, opening, is_silent) as stream,
            asyncio.timeout(None) as self._ending,
            asyncio.TaskGroup() as pulls,
        ):
            while True:
                event = await stream.read()
                match event.WhichOneof("event"):
                    case "accepted":
                        self._epoch = event.accepted.epoch
                    case "refused":
                        is_late = event.refused.code == Overloaded.code
                        raise (Overloaded if is_late else WorkerLost)(
                            f"{self.peer.worker_id} refused the lease of KV blocks: "
                            f"{event.refused.message}",
                            retry_after_s=event.refused.wait_estimate_s,
                        )
                    case "run":
                        self._take(event.run)
                        pulls.create_task(self._pull(stream, event.run))
                    case "released":
                        self._check_released(event.released)
                        return
                    case _ if self._is_answered:
                        raise LeaseLost(f"{self.peer.worker_id} sent two answers on one lease")
                    case _:
                        on_answer(event)
                        if self._next_block != self._end_block:
                            raise LeaseLost(
                                f"{self.peer.worker_id} announced only the KV blocks below "
                                f"number {self._next_block}; this worker needs all KV blocks "
                                f"below number {self._end_block}"
                            )
                        self._is_answered = True
                        stream.engine_waited_for = False
                        self._may_pull.set()
                        await self._release_if_done(stream)

    def _take(self, run: pb.BlockRun) -> None:
        if run.first_block != self._next_block:
            raise LeaseLost(
                f"{self.peer.worker_id} announced KV blocks that begin with number "
                f"{run.first_block}; they must begin with number {self._next_block}"
            )
        self._next_block += len(run.block_ids)
        self.pulled_anything = True
        self._on_begun()

    async def _pull(self, stream: LeaseStream, run: pb.BlockRun) -> None:
        await self._may_pull.wait()
        started = time.monotonic()
        self.stats.began_at = self.stats.began_at or started
        index = run.first_block - self._first_block
        targets = self._targets[index : index + len(run.block_ids)]
        if len(targets) != len(run.block_ids):
            raise LeaseLost(
                f"{self.peer.worker_id} announced {self._next_block} KV blocks, more than requested"
            )
        num_bytes = await self._puller.pull(
            self.peer,
            lease_id=self._lease_id,
            sequence_id=self._sequence_id,
            run=run,
            targets=targets,
        )
        # Only successful pulls are counted. `_is_whole` compares the count with the blocks of the
        # lease, and so finds a pull that failed or was never started.
        self.stats.num_blocks += len(targets)
        self.stats.num_bytes += num_bytes
        self.stats.pull_s += time.monotonic() - started
        await self._release_if_done(stream)

    async def _release_if_done(self, stream: LeaseStream) -> None:
        """Sends `release` once all blocks were pulled. Only the producer's answer `released` makes
        the blocks valid.
        """
        if self._is_whole and not self._is_release_sent:
            self._is_release_sent = True
            await stream.write(pb.PrefillCommand(release=pb.ReleaseLease()))
        if self._is_answered and self._is_release_sent:
            now = asyncio.get_running_loop().time()
            self._ending.reschedule(now + self._config.transfer.release_deadline_s)

    @property
    def is_unconfirmed(self) -> bool:
        """True if `release` was sent and the producer did not confirm it."""
        return self._is_release_sent and not self.stats.released_at

    @property
    def _is_whole(self) -> bool:
        return self._first_block + self.stats.num_blocks == self._end_block

    def _check_released(self, released: pb.Released) -> None:
        same = released.epoch == self._epoch and released.lease_id == self._lease_id
        if not (same and released.whole):
            raise LeaseLost(
                f"{self.peer.worker_id} released the KV blocks before the pulls had ended, so "
                "the pulled blocks are not used"
            )
        if not (self._is_answered and self._is_release_sent and self._is_whole):
            raise LeaseLost(f"{self.peer.worker_id} ended the lease before all blocks were read")
        self.stats.released_at = time.monotonic()


# Function that creates a lease with the given peer. The other arguments of `ConsumerLease` are
# already bound, because they are the same for all leases of a worker.
LeaseMaker = Callable[[Peer], ConsumerLease]
