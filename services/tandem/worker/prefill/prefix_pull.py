"""Pulls cached blocks, named by their hashes, from a worker that holds them.

The blocks are the prefix of a prompt, or a chain of blocks that fills the cache of a new worker.
The prefix of a prompt is pulled in five steps:

    1. `plan` chooses holders. The sequence is added to the engine.
    2. The engine admits the sequence and reserves blocks (`Reserved`).
    3. `fill` sends `hold` to a holder, pulls the runs of blocks and sends `release`.
    4. The holder answers `released`: the pulled blocks are valid.
    5. The engine computes the rest of the prompt (`ContinuePrefill`).

The holder computes nothing for a pull. It may load blocks from its tiers first (engine/
peer_blocks.py). So the consumer waits only for this load, for one step of the holder's engine and
for the transfer of the blocks.
"""

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from tandem.common.adapter import digest_of
from tandem.common.block_hash import hash_blocks
from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.predict import ASK_S, prefill_seconds
from tandem.common.perf_model.rates import PairRate
from tandem.common.perf_model.soonest import Offer
from tandem.common.prompt_image import image_marks
from tandem.engine.cache.layout.kv_groups import state_spacing
from tandem.engine.types import Reserved, SequenceSpec
from tandem.errors import TandemError
from tandem.net.observability.logs import about
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import KvCompatibility
from tandem.worker.kv_pulls.lease import ConsumerLease, LeaseMaker
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.peers import Peers
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_choice import ConnectedHolder, PrefixPlan, holders_worth_using

log = logging.getLogger(__name__)

_HOLDERS_MAX = 2  # number of holders that are tried for one prefix
_DEADLINE_MIN_S = 1.0
# A pull of a prefix is given up after this multiple of the time that computing the prompt would
# take. The prefix is then computed.
_PATIENCE = 2


class PrefixPuller:
    """Pulls prefixes for one worker.

    A holder that is not connected yet is skipped, and a connection to it is opened for later pulls.
    """

    def __init__(
        self,
        config: WorkerConfig,
        compatibility: KvCompatibility,
        peers: Peers,
        rates: Rates,
        metrics: WorkerMetrics,
        make_lease: LeaseMaker,
    ) -> None:
        self._config = config
        self._compatibility = compatibility
        self._block_size = compatibility.block_size
        # Prompts can resume only after multiples of this number of tokens. With states, holders
        # have no state after other tokens.
        self.depth_step_tokens = self._block_size
        if compatibility.has_states:
            self.depth_step_tokens = state_spacing(self._block_size)
        self._peers = peers
        self._rates = rates
        self._metrics = metrics
        self._make_lease = make_lease

    def plan(
        self, spec: SequenceSpec, holders: Iterable[pb.PrefixHolder], *, num_cached_blocks: int = 0
    ) -> PrefixPlan | None:
        """Plans a pull of the prompt's prefix; returns None if the pull would not help.

        The plan has the spec to add to the engine. A pull does not help if computing the prefix is
        predicted to be at least as fast. It does not help either if the request wants log
        probabilities of the prompt, because then the whole prompt must be computed.
        """
        if spec.sampling.prompt_logprobs is not None:
            return None
        connected = [
            ConnectedHolder(
                each.num_blocks * self._block_size,
                rate,
                each.load_s,
                worker_id=each.worker_id,
                epoch=each.epoch,
                address=each.address,
            )
            for each in self.resumable(holders, len(spec.token_ids))
            if each.worker_id != self._config.worker_id and (rate := self._rate(each)) is not None
        ]
        chosen = self._worth_using(connected, spec, num_cached_blocks)
        if not chosen:
            return None
        prefix_blocks = max(holder.num_tokens for holder in chosen) // self._block_size
        # If layers have an attention window, a holder keeps only the last blocks of its prefix for
        # these layers. A holder of 3 blocks therefore cannot help with a prefix of 5 blocks, and
        # only holders of the longest prefix are used.
        if self._compatibility.has_windows:
            prefix_tokens = prefix_blocks * self._block_size
            chosen = [holder for holder in chosen if holder.num_tokens == prefix_tokens]
        rates = self._rates.worker
        pair = chosen[0].rate
        offer = Offer(
            chosen[0].num_tokens // self._block_size,
            ASK_S + pair.latency_s + chosen[0].load_s,
            rates.block_bytes / pair.bytes_per_s,
        )
        added = msgspec.structs.replace(spec, prefix_blocks=prefix_blocks, offer=offer)
        return PrefixPlan(added, chosen)

    def resumable(
        self, holders: Iterable[pb.PrefixHolder], num_tokens: int
    ) -> list[pb.PrefixHolder]:
        """Returns the holders with the depths at which a prompt of `num_tokens` tokens can resume
        with their blocks. Leaves out holders without such a depth.

        The last token must be computed. With states, a depth is rounded down to the last one at
        which the holder can have a state. A router names more blocks of a worker that drains: all
        that this worker has.
        """
        most = (num_tokens - 1) // self._block_size
        step = self.depth_step_tokens // self._block_size
        found = []
        for each in holders:
            depth = min(each.num_blocks, most) // step * step
            if depth:
                found.append(pb.PrefixHolder())
                found[-1].CopyFrom(each)
                found[-1].num_blocks = depth
        return found

    async def fill(self, plan: PrefixPlan, reserved: Reserved) -> int:
        """Pulls the missing blocks of the prefix.

        Returns how many leading blocks of the sequence are valid after the pull. If the pull fails,
        only the blocks that were cached before it are valid. Raises nothing but CancelledError.
        """
        num_cached = reserved.num_cached_tokens // self._block_size
        token_ids = plan.spec.token_ids
        holders = self._worth_using(plan.holders, plan.spec, num_cached)[:_HOLDERS_MAX]
        if not holders:
            return num_cached
        root = self._compatibility.chain_root(
            plan.spec.cache_salt, adapter=digest_of(plan.spec.adapter)
        )
        marks = image_marks(plan.spec.images, self._block_size)
        block_hashes = hash_blocks(root, token_ids, self._block_size, marks)
        computed_s = prefill_seconds(
            self._rates.worker, len(token_ids), num_cached * self._block_size
        )
        patience_s = max(_DEADLINE_MIN_S, _PATIENCE * computed_s)
        try:
            async with asyncio.timeout(min(self._config.transfer.pull_deadline_s, patience_s)):
                return await self._pull_from_any(
                    plan, holders, block_hashes, num_cached, reserved.block_ids
                )
        except TimeoutError:
            sequence_id = plan.spec.sequence_id
            log.warning(
                "the cached prefix of sequence %s was not pulled in time and is computed instead",
                sequence_id,
                extra=about(sequence_id),
            )
            return num_cached

    async def pull(
        self,
        peer: Peer,
        sequence_id: str,
        block_hashes: list[bytes],
        *,
        num_cached: int,
        targets: list[int],
    ) -> int:
        """Pulls a chain from the peer into `targets`, except for its first `num_cached` blocks.

        Returns how many leading blocks of the chain are valid. Raises TandemError.
        """
        lease = self._make_lease(peer)
        return await self._hold(lease, sequence_id, block_hashes, num_cached, targets)

    async def _pull_from_any(
        self,
        plan: PrefixPlan,
        holders: list[ConnectedHolder],
        block_hashes: list[bytes],
        num_cached: int,
        targets: list[int],
    ) -> int:
        sequence_id = plan.spec.sequence_id
        for holder in holders:
            peer = self._peers.get_now(holder.worker_id, holder.epoch, holder.address)
            if peer is None:
                continue
            lease = self._make_lease(peer)
            wanted = block_hashes[: holder.num_tokens // self._block_size]
            # A holder of a shorter prefix fills only the first target blocks. If layers have an
            # attention window, all holders have the whole prefix (see `plan`).
            filled = targets
            if not self._compatibility.has_windows:
                filled = targets[: len(wanted) - num_cached]
            load_s_max = self._load_s_max(holder, len(plan.spec.token_ids), num_cached)
            try:
                num_blocks = await self._hold(
                    lease, sequence_id, wanted, num_cached, filled, load_s_max
                )
                if num_blocks > num_cached:
                    return num_blocks
            except Exception as error:
                # After any error the pulled blocks are discarded and the prefix is computed.
                self._metrics.on_lost_lease(lease)
                log.warning(
                    "the cached prefix of sequence %s could not be pulled from %s, so it is pulled "
                    "from another worker or computed: %s",
                    sequence_id,
                    peer.worker_id,
                    error,
                    exc_info=None if isinstance(error, TandemError) else error,
                    extra=about(sequence_id),
                )
                if lease.pulled_anything:
                    # An unfinished read from this holder may still write the target blocks, so no
                    # other holder is tried.
                    break
        return num_cached

    async def _hold(
        self,
        lease: ConsumerLease,
        sequence_id: str,
        block_hashes: list[bytes],
        num_cached: int,
        targets: list[int],
        load_s_max: float = 0.0,
    ) -> int:
        num_blocks = await lease.hold(
            sequence_id,
            block_hashes,
            first_missing_block=num_cached,
            targets=targets,
            load_s_max=load_s_max,
        )
        self._metrics.on_prefix_pull(lease.peer, lease.stats)
        return max(num_cached, num_blocks)

    def _load_s_max(self, holder: ConnectedHolder, num_tokens: int, num_cached: int) -> float:
        """Returns the seconds that a holder may take to load the prefix from its tiers. With a
        longer load, computing the prefix would be faster."""
        rates = self._rates.worker
        cached_tokens = num_cached * self._block_size
        saved_s = prefill_seconds(rates, num_tokens, cached_tokens)
        saved_s -= prefill_seconds(rates, num_tokens, holder.num_tokens)
        num_blocks = (holder.num_tokens - cached_tokens) / self._block_size
        return max(0.0, saved_s - ASK_S - holder.rate.seconds(rates.moved_bytes(num_blocks)))

    def _worth_using(
        self, holders: Iterable[ConnectedHolder], spec: SequenceSpec, num_cached_blocks: int
    ) -> list[ConnectedHolder]:
        return holders_worth_using(
            holders,
            rates=self._rates.worker,
            block_size=self._block_size,
            num_tokens=len(spec.token_ids),
            num_cached_blocks=num_cached_blocks,
        )

    def _rate(self, holder: pb.PrefixHolder) -> PairRate | None:
        """Returns the rate of pulls from a holder; None if the holder is not connected."""
        peer = self._peers.get_now(holder.worker_id, holder.epoch, holder.address)
        if peer is None:
            return None
        return self._rates.rate(peer.worker_id, peer.transport)
