"""How a reserved prompt gets its KV: from a candidate under a lease, or computed here.

    reserved --> plan --> ask the first of it --> whole lease --> Commit
                  ^  |              `--> failed or refused: without it, or with the wait it named
                  |  |                        |
                  `--+------------------------'
                     `--> here: StartLocalPrefill

Each failure plans anew. Whatever a lost lease brought is given up (`Restart`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from tandem.config import WorkerConfig
from tandem.engine.types import Mode, Reserved
from tandem.errors import LeaseLost, TandemError
from tandem.observability.logs import about
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.decode.prefill_choice import Plan
from tandem.worker.decode.prefill_planner import PrefillPlanner
from tandem.worker.decode.sequence import DecodeSequence
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import (
    Commit,
    ContinuePrefill,
    Restart,
    StartLocalPrefill,
)
from tandem.worker.kv_pulls.lease import LeaseMaker, PullStats, ReaderLease
from tandem.worker.kv_pulls.lease_stream import is_source_gone
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.peers import Peers
from tandem.worker.prefill.prefix_pull import PrefixPuller

log = logging.getLogger(__name__)

_WAIT_MAX_S = 2.0  # for a candidate that refused and is still the best; asked once more
_ASKED_MAX = 2


class Owner(Protocol):
    """Whose sequences they are."""

    def is_over(self, sequence: DecodeSequence) -> bool: ...

    def finish_if_over(self, sequence: DecodeSequence) -> bool: ...

    def on_first_token(self, sequence: DecodeSequence, token_id: int, stats: PullStats) -> None: ...

    def on_source_lost(self, sequence: DecodeSequence) -> bool:
        """Tells that a prefill worker was lost under it; whether it may cost another one."""

    def as_holder(self, num_blocks: int) -> list[pb.PrefixHolder]:
        """This worker as one that has so many first blocks of a prompt; empty if it has none."""


class PromptPrefill:
    """For all sequences of one decode worker."""

    def __init__(
        self,
        config: WorkerConfig,
        link: EngineLink,
        peers: Peers,
        metrics: WorkerMetrics,
        planner: PrefillPlanner,
        owner: Owner,
        prefixes: PrefixPuller,
        make_lease: LeaseMaker,
    ) -> None:
        self._config = config
        self._link = link
        self._peers = peers
        self._metrics = metrics
        self._planner = planner
        self._owner = owner
        self._prefixes = prefixes
        self._make_lease = make_lease
        self._block_size = config.engine.block_size

    async def run(self, sequence: DecodeSequence, reserved: Reserved) -> None:
        """Commits the first whole lease, else starts prefill here."""
        if sequence.prefix is not None:
            num_blocks = await self._prefixes.fill(sequence.prefix, reserved)
            self._link.send(ContinuePrefill(sequence.sequence_id, num_blocks))
            return
        left = list(sequence.candidates)
        asked: dict[str, int] = {}
        waits_s: dict[str, float] = {}
        while left and sequence.may_ask:
            plan = self._plan(sequence, reserved, left, waits_s)
            if not plan.candidates:
                break
            candidate = next(c for c in left if c.worker_id == plan.candidates[0])
            name = candidate.worker_id
            left.remove(candidate)
            await asyncio.sleep(min(waits_s.get(name, 0.0), _WAIT_MAX_S))
            lease = await self._lease(candidate)
            if self._owner.is_over(sequence):
                return
            if lease is None or not sequence.may_ask:
                continue
            asked[name] = asked.get(name, 0) + 1
            try:
                first_token_id = await self._run_lease(sequence, reserved, lease)
            except Exception as error:
                # Whatever it was, nothing that was pulled is trusted: only a whole lease commits.
                self._note_failure(sequence, error)
                sequence.timings.prefill_worker_id = ""
                if self._owner.is_over(sequence) or self._owner.finish_if_over(sequence):
                    return
                if is_source_gone(error) and not self._owner.on_source_lost(sequence):
                    return
                wait_s = error.retry_after_s if isinstance(error, TandemError) else None
                if wait_s and asked[name] < _ASKED_MAX:
                    waits_s[name] = wait_s
                    left.append(candidate)
                if not lease.pulled_anything:
                    continue
                reserved_again = self._restart(sequence, remote=bool(left))
                if reserved_again is None:
                    return
                reserved = await reserved_again
                continue
            if self._owner.is_over(sequence):
                return
            self._record(sequence, lease)
            self._link.send(Commit(sequence.sequence_id, first_token_id))
            return
        self._metrics.local_prefills.inc()
        self._prefill_here(sequence, reserved)

    def _prefill_here(self, sequence: DecodeSequence, reserved: Reserved) -> None:
        """With its first blocks from a holder where that is sooner: it is reserved once more."""
        here = msgspec.structs.replace(sequence.spec, mode=Mode.HERE, remote_prefill_min_tokens=0)
        num_cached = reserved.num_cached_tokens // self._block_size
        sequence.prefix = self._prefixes.plan(here, sequence.holders, num_cached_blocks=num_cached)
        if sequence.prefix is None:
            self._link.send(StartLocalPrefill(sequence.sequence_id))
            return
        sequence.spec, sequence.reserved = sequence.prefix.spec, None
        self._link.send(Restart(sequence.spec))

    def _plan(
        self,
        sequence: DecodeSequence,
        reserved: Reserved,
        left: list[pb.PrefillCandidate],
        waits_s: dict[str, float],
    ) -> Plan:
        plan = self._planner.plan(
            left,
            sequence.holders,
            waits_s,
            num_tokens=len(sequence.spec.token_ids),
            cached_tokens=reserved.num_cached_tokens,
        )
        choice = "remote" if plan.candidates else "local"
        again = "first" if left == sequence.candidates else "again"
        self._metrics.on_choice(choice, again)
        log.debug(
            "%s is prefilled %s: %s",
            sequence.request_id,
            choice,
            plan.reason,
            extra=about(sequence.sequence_id),
        )
        return plan

    async def _run_lease(
        self, sequence: DecodeSequence, reserved: Reserved, lease: ReaderLease
    ) -> int:
        def on_first_token(token_id: int, stats: PullStats) -> None:
            sequence.timings.prefill_worker_id = lease.peer.worker_id
            self._owner.on_first_token(sequence, token_id, stats)

        missing = len(sequence.spec.token_ids) - reserved.num_cached_tokens
        first_missing = reserved.num_cached_tokens // self._block_size
        try:
            async with asyncio.timeout(None) as sequence.asks:
                with self._planner.sent(lease.peer.worker_id, missing):
                    return await lease.run(
                        sequence.spec,
                        request_id=sequence.request_id,
                        first_missing_block=first_missing,
                        targets=reserved.block_ids,
                        prefix_holders=[*self._owner.as_holder(first_missing), *sequence.holders],
                        trace=sequence.span.headers,
                        on_first_token=on_first_token,
                    )
        except TimeoutError as error:
            raise LeaseLost("it is given up: this worker asks nobody any more") from error
        finally:
            sequence.asks = None

    async def _lease(self, candidate: pb.PrefillCandidate) -> ReaderLease | None:
        try:
            peer = await self._peers.get(candidate.worker_id, candidate.epoch, candidate.address)
        except TandemError as error:
            log.warning("prefill worker %s is passed over: %s", candidate.worker_id, error)
            return None
        return self._make_lease(peer)

    def _note_failure(self, sequence: DecodeSequence, error: Exception) -> None:
        expected = isinstance(error, TandemError)
        log.warning(
            "prefill of %s failed: %s",
            sequence.request_id,
            error,
            exc_info=None if expected else error,
            extra=about(sequence.sequence_id),
        )
        self._metrics.prefill_failures.inc()

    def _restart(
        self, sequence: DecodeSequence, *, remote: bool
    ) -> asyncio.Future[Reserved] | None:
        """Gives up what was pulled; a future of the next reservation if another prefills."""
        mode = Mode.AWAIT_KV if remote else Mode.HERE
        spec = msgspec.structs.replace(sequence.spec, mode=mode, remote_prefill_min_tokens=0)
        sequence.spec = spec
        sequence.reserved = asyncio.get_running_loop().create_future() if remote else None
        self._link.send(Restart(spec))
        return sequence.reserved

    def _record(self, sequence: DecodeSequence, lease: ReaderLease) -> None:
        stats, timings = lease.stats, sequence.timings
        timings.transfer_exposed_ms = stats.exposed_s * 1000
        timings.transfer_ms = stats.pull_s * 1000
        timings.blocks_pulled = stats.num_blocks
        timings.blocks_skipped = stats.num_skipped
        timings.bytes_pulled = stats.num_bytes
        timings.prefill_worker_id = lease.peer.worker_id
        timings.transport = lease.peer.transport
        self._metrics.on_pull(lease.peer, stats)
