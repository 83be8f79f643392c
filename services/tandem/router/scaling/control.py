"""Makes the changes to the cluster that operators request over HTTP or gRPC.

Operators can change pool sizes and a worker's role, drain a worker, and reset prefix caches.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import msgspec

from tandem.common.config.cluster import SIZED_POOLS, WORKER_POOLS
from tandem.common.config.router import RouterConfig
from tandem.common.pool_sizes import check_sizes
from tandem.errors import BadRequest, NotNow, WorkerLost, WorkerNotFound
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.net.store.registry import WorkerRecord
from tandem.router.scaling.changes import logged_change, shown_sizes
from tandem.router.scaling.departures import Departures
from tandem.router.scaling.size_owner import SizeOwner
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
SEEN_DEADLINE_S = 3.0
DRAIN_DEADLINE_MAX_S = 3600.0
_OTHER = {"prefill": "decode", "decode": "prefill"}


class RoleSet(msgspec.Struct, frozen=True):
    worker_id: str
    role: str
    took_s: float  # seconds that the worker needed to change its role
    seen_s: float  # seconds from the call of `set_role` until this router saw the new role


class ClusterControl:
    """Makes operators' changes to the pools of one model. Raises errors of `tandem/errors.py`.

    The log of changes names the caller, `who`.
    """

    def __init__(self, config: RouterConfig, view: ClusterView, trail: AuditTrail) -> None:
        self._trail = trail
        self.group = config.group
        self.view = view
        self.sizes = SizeOwner(config, view, trail)
        self._departures = Departures(view.redis, config.cluster.cluster_id)

    async def scale(self, wanted: dict[str, Any], *, who: Caller) -> dict[str, int]:
        """Requests pool sizes from the program that owns them, and returns the requested sizes.

        The caller polls the pool state to see when the pools have these sizes. Raises NotNow if
        this router can reach no owner of the sizes.
        """
        try:
            # The routers belong to no model, and are scaled with the pools of the first one.
            sizes = check_sizes(wanted, SIZED_POOLS if not self.group else WORKER_POOLS)
        except BadRequest:
            with logged_change(self._trail, who, "sizes") as change:
                change.after = shown_sizes(wanted)
                raise
        await self.sizes.set_sizes(sizes, who=who)
        return sizes

    async def set_role(self, worker_id: str, role: str = "", *, who: Caller) -> RoleSet:
        """Moves a worker to the pool `role`, or to the other pool if `role` is empty.

        Waits up to `SEEN_DEADLINE_S` seconds until this router's view has the new role. Raises
        NotNow for the last decode worker, because without it no worker could answer requests.
        """
        started = time.monotonic()
        with logged_change(self._trail, who, f"role of {worker_id}") as change:
            change.after = role or "the other"
            record = self.record(worker_id)
            change.before = record.role
            if not record.has_kv:
                raise BadRequest(f"{worker_id} is an encode worker, which keeps its role")
            change.after = role = role or _OTHER[record.role]
            if role not in _OTHER:
                message = f"role is {role[:80]!r}; it must be prefill or decode"
                raise BadRequest(message, param="role")
            request = pb.SetRoleRequest(role=role)
            if role == "prefill" and record.role == "decode":
                async with self._departure(record):
                    reply = await self.call(record, "SetRole", request)
            else:
                reply = await self.call(record, "SetRole", request)
                await self._departures.give_up(record.epoch)
        try:
            async with asyncio.timeout(SEEN_DEADLINE_S):
                while not self._is_seen(worker_id, role):
                    await self.view.wait_change()
            self._departures.forget(record.epoch)
        except TimeoutError:
            log.warning(
                "worker %s moved to the %s pool, but its record in Redis still shows the old "
                "pool after %g s. Until the record shows the new pool, this router counts "
                "the worker in the old pool",
                worker_id,
                role,
                SEEN_DEADLINE_S,
            )
        return RoleSet(worker_id, role, reply.took_s, time.monotonic() - started)

    async def drain(
        self, worker_id: str, deadline_s: Any, *, force: bool = False, who: Caller
    ) -> None:
        """Starts a worker's drain. If `deadline_s` is 0, the worker uses its configured deadline.

        Routers place no new request on the worker and migrate its sequences. The worker ends when
        it has no sequence left. The last decode worker drains only with `force`.
        """
        with logged_change(self._trail, who, f"drain of {worker_id}") as change:
            change.after = "draining"
            is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
            if not is_number or not 0 <= deadline_s <= DRAIN_DEADLINE_MAX_S:
                limits = f"from 0 (the worker's configured deadline) to {DRAIN_DEADLINE_MAX_S:g}"
                message = f"deadline_s must be a number of seconds {limits}"
                raise BadRequest(message, param="deadline_s")
            record = self.record(worker_id)
            change.before = record.state
            request = pb.DrainRequest(deadline_s=deadline_s)
            if record.role != "decode" or record.state == "draining":
                await self.call(record, "Drain", request)
                return
            way_out = (
                ". Start another one first (`tandem scale decode=2`), or drain it anyway "
                'with --force (HTTP and gRPC: "force": true)'
            )
            async with self._departure(record, way_out, force=force):
                await self.call(record, "Drain", request)

    async def reset_prefix_cache(self, worker_id: str = "", *, who: Caller) -> dict[str, int]:
        """Makes all workers, or the named one, drop their unused cached blocks.

        Returns the number of dropped blocks of each worker. Raises WorkerLost if a worker did not
        answer; the other workers have dropped their blocks.
        """
        with logged_change(self._trail, who, f"prefix cache of {worker_id or 'all'}") as change:
            change.after = "empty"
            known = [w.record for w in self.view.known()]
            records = [self.record(worker_id)] if worker_id else known
            request = pb.ResetPrefixCacheRequest()
            replies = await asyncio.gather(
                *(self.call(record, "ResetPrefixCache", request) for record in records),
                return_exceptions=True,
            )
            dropped = {}
            for record, reply in zip(records, replies, strict=True):
                if isinstance(reply, BaseException):
                    raise reply
                dropped[record.worker_id] = reply.num_blocks
            return dict(sorted(dropped.items()))

    async def call(self, record: WorkerRecord, method: str, request: Any) -> Any:
        """Calls the gRPC method `method` of a worker and returns the reply.

        Raises NotNow if the worker refuses the call at present, and WorkerLost after any other
        failure.
        """
        async with self.view.calls.open(record.address) as channel:
            stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
            call = getattr(stub, method)
            try:
                return await call(
                    request, timeout=CALL_DEADLINE_S, metadata=self.view.calls.metadata
                )
            except grpc.aio.AioRpcError as error:
                message = (
                    f"{record.worker_id} did not complete the call {method}: {error.details()}"
                )
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise NotNow(message) from error
                raise WorkerLost(message) from error

    def record(self, worker_id: str) -> WorkerRecord:
        """Returns the record of a worker. Raises WorkerNotFound."""
        known = {w.record.worker_id: w.record for w in self.view.known()}
        if worker_id not in known:
            names = ", ".join(sorted(known)) or "none"
            raise WorkerNotFound(f"there is no worker {worker_id[:80]!r}; there are: {names}")
        return known[worker_id]

    @asynccontextmanager
    async def _departure(
        self, record: WorkerRecord, way_out: str = "", *, force: bool = False
    ) -> AsyncIterator[None]:
        """Claims a decode worker (`departures.py`), which the `with` block then moves or drains.

        If the `with` block raises, the claim ends at once. Raises NotNow if no decode worker would
        be left, unless `force` is True. `way_out` is advice for the message of NotNow.
        """
        own = frozenset({record.epoch})
        try:
            leaving = await self._departures.claim(record.epoch)
            if not force and not self.view.has_decode_worker(own | leaving):
                only = "the only decode worker"
                if self.view.has_decode_worker(own):
                    only += " that stays, because the others are leaving now"
                message = f"{record.worker_id} is {only}: without it, no request can be answered"
                message += way_out
                raise NotNow(message)
            yield
        except BaseException:
            await self._departures.give_up(record.epoch)
            raise

    def _is_seen(self, worker_id: str, role: str) -> bool:
        seen = self.view.roster().by_id.get(worker_id)
        return seen is not None and seen.role == role and seen.usable
