"""Obtains the KV of a reserved prompt: from a candidate under a lease, or by local prefill.

A candidate is a prefill worker that the router named.

    1. Predict the time of each candidate and of local prefill.
    2. If local prefill is clearly faster or no candidate is left, prefill locally. This is the end.
    3. Otherwise open a lease with the best candidate and pull the blocks that it computes.
    4. If all blocks were pulled while the candidate held them, commit them. This is the end.
    5. If the candidate refused or the lease failed, drop the candidate and go back to step 1.

A candidate that refused and named a wait stays in the list for a second attempt after that wait.
Candidates and prefix holders that are silent or hang are skipped.

If some blocks of a failed lease were already pulled, the sequence gives them up and is queued again
(`Restart`) before step 1.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import msgspec

from tandem.engine.types import Mode, Reserved, SequenceSpec
from tandem.errors import LeaseLost, Overloaded, ProducerSilent, TandemError
from tandem.net.observability.logs import about
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.decode.live_sequences import DecodeSequences
from tandem.worker.decode.prefill_choice import PrefillPlan
from tandem.worker.decode.prefill_planner import PrefillPlanner
from tandem.worker.decode.sequence import DecodeSequence, SequenceState
from tandem.worker.engine_process import messages
from tandem.worker.kv_pulls.lease import ConsumerLease, LeaseMaker, PullStats
from tandem.worker.kv_pulls.lease_stream import is_producer_gone
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.peers import Peers
from tandem.worker.prefill.prefix_choice import PrefixPlan
from tandem.worker.prefill.prefix_pull import PrefixPuller

log = logging.getLogger(__name__)

# longest wait, in seconds, before a candidate that refused is tried again
_WAIT_MAX_S = 2.0
_ATTEMPTS_MAX = 2


@dataclass(frozen=True, slots=True)
class Producers:
    """The components through which this worker obtains blocks from other workers."""

    peers: Peers
    prefixes: PrefixPuller
    make_lease: LeaseMaker


class PromptPrefill:
    """Obtains KV for the reserved prompts of one decode worker."""

    def __init__(
        self,
        parts: WorkerParts,
        producers: Producers,
        planner: PrefillPlanner,
        sequences: DecodeSequences,
        identity: pb.PrefixHolder,
    ) -> None:
        """`identity` has the address of this worker, from which a candidate may pull the prompt's
        first blocks.
        """
        self._link = parts.link
        self._metrics = parts.metrics
        self._producers = producers
        self._planner = planner
        self._sequences = sequences
        self._identity = identity
        self._block_size = parts.config.engine.block_size
        self._has_tiers = parts.config.engine.has_tiers

    def compared(
        self,
        spec: SequenceSpec,
        candidates: list[pb.PrefillCandidate],
        holders: list[pb.PrefixHolder],
    ) -> SequenceSpec:
        """Returns the spec with the predicted times in which peers could deliver the prompt's KV.

        The engine compares these times with loading blocks from this worker's tiers. Without tiers
        the spec has no such times.
        """
        producer = None
        offer = None
        if self._has_tiers and candidates:
            producer = self._planner.producer(candidates, holders, len(spec.token_ids))
        if producer is not None:
            plan = self._producers.prefixes.plan(spec, holders)
            offer = None if plan is None else plan.spec.offer
        return msgspec.structs.replace(spec, offer=offer, producer=producer)

    async def run(self, sequence: DecodeSequence, reserved: Reserved) -> None:
        """Commits the blocks of the first lease that succeeds. If none does, prefills locally."""
        if sequence.prefix is not None:
            await self._pull_prefix(sequence, sequence.prefix, reserved)
            return
        left = self._planner.alive(sequence.submission.candidates)
        num_attempts: dict[str, int] = {}
        waits_s: dict[str, float] = {}
        plan: PrefillPlan | None = None
        while left and sequence.may_prefill_remotely:
            plan = self._plan(sequence, reserved, left, waits_s)
            if not plan.candidates:
                break
            candidate = next(c for c in left if c.worker_id == plan.candidates[0])
            name = candidate.worker_id
            left.remove(candidate)
            await asyncio.sleep(min(waits_s.get(name, 0.0), _WAIT_MAX_S))
            lease = await self._lease(candidate)
            if sequence.is_over:
                return
            if lease is None or not sequence.may_prefill_remotely:
                continue
            num_attempts[name] = num_attempts.get(name, 0) + 1
            sequence.to(SequenceState.PULLING)
            try:
                first_token_id = await self._run_lease(sequence, reserved, lease)
            except Exception as error:
                # After any error, all blocks that this lease pulled are discarded.
                if not isinstance(error, Overloaded):
                    self._note_failure(sequence, lease, error)
                if isinstance(error, LeaseLost) and not sequence.is_over:
                    self._planner.note_failed(name, candidate.epoch, str(error))
                if isinstance(error, ProducerSilent):
                    self._planner.note_lost(name)
                left = self._planner.alive(left)
                if not sequence.is_over:
                    self._sequences.finish_if_over(sequence)
                if not sequence.is_over and is_producer_gone(error):
                    self._sequences.lose_producer(sequence)
                if sequence.is_over:
                    return
                wait_s = error.retry_after_s if isinstance(error, TandemError) else None
                if (
                    wait_s
                    and num_attempts[name] < _ATTEMPTS_MAX
                    and not isinstance(error, Overloaded)
                ):
                    waits_s[name] = wait_s
                    left.append(candidate)
                if not lease.pulled_anything:
                    sequence.to(SequenceState.RESERVED)
                    continue
                mode = Mode.WAITING_FOR_REMOTE_KV if left else Mode.LOCAL
                spec = msgspec.structs.replace(
                    sequence.spec, mode=mode, remote_prefill_min_tokens=0
                )
                spec = self.compared(spec, left, sequence.submission.holders)
                self._restart(sequence, spec, is_awaited=bool(left))
                if sequence.reserved is None:
                    return
                reserved = await sequence.reserved
                continue
            if sequence.is_over:
                return
            self._planner.note_success(name)
            self._record(sequence, lease)
            sequence.to(SequenceState.RUNNING)
            sums = lease.block_sums
            self._link.send(messages.Commit(sequence.sequence_id, first_token_id, sums))
            self._sequences.send_committed(sequence)
            return
        if plan is None or plan.candidates:  # The prompt is not computed here because of the plan.
            sequence.timings.local_prefill_ms = sequence.timings.remote_prefill_ms = 0.0
        late_s = self._planner.late_if_local_s(sequence.spec, reserved.num_cached_tokens)
        if late_s > 0:
            message = (
                f"this worker would send the first token of the request {late_s:.1f} s after "
                "the limit (--ttft-limit)"
            )
            self._sequences.abort(sequence, Overloaded.code, message, retry_after_s=late_s)
            return
        self._metrics.local_prefills.inc()
        self._prefill_locally(sequence, reserved)

    async def _pull_prefix(
        self, sequence: DecodeSequence, plan: PrefixPlan, reserved: Reserved
    ) -> None:
        sequence.to(SequenceState.PULLING)
        num_blocks = await self._producers.prefixes.fill(plan, reserved)
        if sequence.is_over:
            return
        sequence.to(SequenceState.RUNNING)
        self._sequences.send_admitted(sequence)
        self._link.send(messages.ContinuePrefill(sequence.sequence_id, num_blocks))

    def _prefill_locally(self, sequence: DecodeSequence, reserved: Reserved) -> None:
        """Starts local prefill.

        If pulling the prompt's first blocks from a holder is faster than computing them, the
        sequence is queued again instead. After the next reservation, `run` pulls those blocks.
        """
        local = msgspec.structs.replace(
            sequence.spec,
            mode=Mode.LOCAL,
            remote_prefill_min_tokens=0,
            offer=None,
            producer=None,
        )
        num_cached = reserved.num_cached_tokens // self._block_size
        holders = self._planner.alive(sequence.submission.holders)
        sequence.prefix = self._producers.prefixes.plan(
            local, holders, num_cached_blocks=num_cached
        )
        if sequence.prefix is None:
            sequence.to(SequenceState.RUNNING)
            self._sequences.send_admitted(sequence)
            self._link.send(messages.StartLocalPrefill(sequence.sequence_id))
            if not local.is_batch:
                local_s = self._planner.local_prefill_seconds(
                    len(local.token_ids), reserved.num_cached_tokens
                )
                self._planner.note_local_prefill(self._link.num_sent, local_s)
            return
        self._restart(sequence, sequence.prefix.spec)

    def _plan(
        self,
        sequence: DecodeSequence,
        reserved: Reserved,
        left: list[pb.PrefillCandidate],
        waits_s: dict[str, float],
    ) -> PrefillPlan:
        plan = self._planner.plan(
            left,
            sequence.submission.holders,
            waits_s,
            num_tokens=len(sequence.spec.token_ids),
            cached_tokens=reserved.num_cached_tokens,
            is_batch=sequence.spec.is_batch,
        )
        if not sequence.num_sent:
            sequence.timings.local_prefill_ms = plan.local_s * 1000
            sequence.timings.remote_prefill_ms = plan.remote_s * 1000
        choice = "remote" if plan.candidates else "local"
        again = "first" if left == sequence.submission.candidates else "again"
        self._metrics.on_choice(choice, again)
        named = about(sequence.sequence_id)
        log.debug(
            "prefill of request %s is %s: %s",
            sequence.request_id,
            choice,
            plan.reason,
            extra=named,
        )
        return plan

    async def _run_lease(
        self, sequence: DecodeSequence, reserved: Reserved, lease: ConsumerLease
    ) -> int:
        def on_first_token(prefilled: pb.Prefilled, stats: PullStats) -> None:
            sequence.timings.prefill_worker_id = lease.peer.worker_id
            self._sequences.send_first_token(sequence, prefilled, stats)

        first_missing = reserved.num_cached_tokens // self._block_size
        try:
            async with asyncio.timeout(None) as sequence.remote_prefill:
                # No other prompt waits for that of a line of a batch.
                num_tokens = 0 if sequence.spec.is_batch else len(sequence.spec.token_ids)
                num_cached = reserved.num_cached_tokens
                with self._planner.sent(lease.peer.worker_id, num_tokens, num_cached):
                    return await lease.run(
                        sequence.spec,
                        request_id=sequence.request_id,
                        first_missing_block=first_missing,
                        targets=reserved.block_ids,
                        prefix_holders=self._holders(sequence, first_missing),
                        trace=sequence.span.headers,
                        is_silent=partial(self._planner.is_silent, lease.peer.worker_id),
                        on_begun=partial(self._sequences.send_admitted, sequence),
                        on_first_token=on_first_token,
                    )
        except TimeoutError as error:
            raise LeaseLost(
                "the lease on the prefill worker's KV is given up, because this worker leaves "
                "the decode pool"
            ) from error
        finally:
            sequence.remote_prefill = None

    def _holders(self, sequence: DecodeSequence, num_blocks: int) -> list[pb.PrefixHolder]:
        """Returns the workers from which a candidate may pull the prompt's first blocks.

        `num_blocks` says how many leading blocks of the prompt this worker itself has cached. If it
        is greater than 0, this worker is the first of the returned holders.
        """
        holders = self._planner.alive(sequence.submission.holders)
        if not num_blocks:
            return holders
        own = pb.PrefixHolder(num_blocks=num_blocks)
        own.MergeFrom(self._identity)
        return [own, *holders]

    async def _lease(self, candidate: pb.PrefillCandidate) -> ConsumerLease | None:
        try:
            peer = await self._producers.peers.get(
                candidate.worker_id, candidate.epoch, candidate.address
            )
        except TandemError as error:
            log.warning(
                "cannot connect to prefill worker %s, so another worker computes the prompt: %s",
                candidate.worker_id,
                error,
            )
            return None
        return self._producers.make_lease(peer)

    def _note_failure(
        self, sequence: DecodeSequence, lease: ConsumerLease, error: Exception
    ) -> None:
        traceback = None if isinstance(error, TandemError) else error
        named = about(sequence.sequence_id)
        request_id = sequence.request_id
        log.warning(
            "prefill of request %s failed: %s",
            request_id,
            error,
            exc_info=traceback,
            extra=named,
        )
        self._metrics.prefill_failures.inc()
        self._metrics.on_lost_lease(lease)
        sequence.timings.prefill_worker_id = ""

    def _restart(
        self, sequence: DecodeSequence, spec: SequenceSpec, *, is_awaited: bool = False
    ) -> None:
        """Gives up the pulled blocks and queues the sequence again with `spec`.

        If `is_awaited` is True, the caller then waits for the new reservation in
        `sequence.reserved`.
        """
        loop = asyncio.get_running_loop()
        sequence.to(SequenceState.QUEUED)
        sequence.spec = spec
        sequence.reserved = loop.create_future() if is_awaited else None
        self._link.send(messages.Restart(spec))

    def _record(self, sequence: DecodeSequence, lease: ConsumerLease) -> None:
        stats = lease.stats
        timings = sequence.timings
        timings.transfer_exposed_ms = stats.exposed_s * 1000
        timings.transfer_ms = stats.pull_s * 1000
        timings.blocks_pulled = stats.num_blocks
        timings.blocks_skipped = stats.num_skipped
        timings.bytes_pulled = stats.num_bytes
        timings.prefill_worker_id = lease.peer.worker_id
        timings.transport = lease.peer.transport
        self._metrics.on_pull(lease.peer, stats)
