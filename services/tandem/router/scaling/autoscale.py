"""Runs the autoscaler in a router: adds the demand of all routers and requests pool sizes.

Redis key                    Type and value
{tandem:CLUSTER}:demand      HASH, router -> MessagePack of (time, requests held, Demand)
{tandem:CLUSTER}:autoscaler  STRING, name of the leader; expires if the leader does not renew it
{tandem:CLUSTER}:autoscale   STRING, JSON of the last decisions; expires like the leader's name

The keys of a further model end with `:GROUP`. Each model has a leader and decisions of its own.

Every router writes its own demand. One router is the leader. The leader runs the policy
(`autoscaler/policy.py`) and requests the sizes from the program that owns the sizes
(`size_owner.py`), as `tandem scale` does. If an HPA or KEDA owns the sizes, it reads the decided
sizes from the metric `tandem_desired_workers` of any router. While Redis does not answer, sizes do
not change.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.common.config.router import RouterConfig
from tandem.errors import TandemError
from tandem.net.observability.metrics import gauges
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.net.store.client import UNREACHABLE, UNREADABLE
from tandem.net.store.script import Script
from tandem.router.autoscaler.demand import Demand, DemandMeter, Observation
from tandem.router.autoscaler.policy import Autoscaler, ScalingDecision
from tandem.router.scaling.pool_observation import likely_decode, see_pool
from tandem.router.scaling.size_owner import SizeOwner
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

# One router's (time of writing in seconds since 1970, number of requests that the router holds
# because a pool is empty, demand counters).
_DemandRecord = tuple[float, int, Demand]
# While the decode pool has no workers, the router looks for held requests this often (seconds).
_WAKE_POLL_S = 0.2
# Another router becomes the leader if the leader does not renew its lease for this many intervals
# of the autoscaler.
_LEASE_INTERVALS = 3
_GONE_AFTER_S = 600.0  # a router's demand is dropped if it was not written for this many seconds

# Makes this router the leader if there is no leader. If this router is the leader already, its
# lease is renewed.
# KEYS: 1 the key of the leader's name. ARGV: 1 this router's name, 2 length of the lease in ms.
# Returns 1 if this router is the leader, else 0.
_LEAD = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""


class AutoscaleLoop:
    """Runs the autoscaler in a router. `meter` has the demand on this router."""

    def __init__(
        self,
        config: RouterConfig,
        view: ClusterView,
        meter: DemandMeter,
        trail: AuditTrail,
        *,
        num_held: Callable[[], int],
    ) -> None:
        """`num_held` returns how many requests this router holds because a pool is empty."""
        self._owner = SizeOwner(config, view, trail)
        self._meter = meter
        self._config = config
        self._view = view
        self._num_held = num_held
        self._name = f"{config.router_id}/{secrets.token_hex(4)}"  # name of this router's process
        prefix = f"{{tandem:{config.cluster.cluster_id}}}"
        of_group = f":{config.group}" if config.group else ""
        self._demand_key = f"{prefix}:demand{of_group}"
        self._decisions_key = f"{prefix}:autoscale{of_group}"
        self._leader_key = f"{prefix}:autoscaler{of_group}"
        self._lead = Script(_LEAD)
        self._policy: Autoscaler | None = None  # None: this router is not the leader
        self._last: dict[str, Demand] = {}  # name of a router -> its counters at the last reading
        self._total = Demand()

    async def run(self) -> None:
        """Runs until cancelled. Must not be called if autoscaling is off."""
        interval_s = self._config.autoscale.interval_s
        while True:
            try:
                await self._turn()
                await self._pause()
                continue
            except UNREACHABLE as error:
                log.warning(
                    "Redis does not answer, so autoscaling is paused until it does: %r", error
                )
            except TandemError as error:
                log.warning("the autoscaler cannot set pool sizes: %s", error.message)
            except Exception:
                # The cause is a bug, or data from a router of another version. The pools keep their
                # sizes, and requests are served.
                self._policy = None
                log.exception("autoscaling failed; it is tried again in %g s", interval_s)
            await asyncio.sleep(interval_s)

    async def _pause(self) -> None:
        """Waits for an interval, or until a request arrives while the decode pool is empty."""
        ends_at = time.monotonic() + self._config.autoscale.interval_s
        while (left_s := ends_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _WAKE_POLL_S))
            if self._sleeps() and await self._is_awaited():
                return

    def _sleeps(self) -> bool:
        """Returns whether the decided size of the decode pool is 0."""
        return any(d.role == "decode" and d.to == 0 for d in self._view.decisions)

    async def _is_awaited(self) -> bool:
        """Returns whether a request is held because a pool is empty.

        The leader considers the requests of all routers. Another router considers only its own.
        """
        if self._num_held():
            return True
        return self._policy is not None and await self._sum_demand() > 0

    async def _turn(self) -> None:
        redis = self._view.redis
        config = self._config.autoscale
        if self._view.redis_state != "ok":
            return  # without Redis, the routers do not know the workers
        mine = msgspec.msgpack.encode((time.time(), self._num_held(), self._meter.demand()))
        await redis.hset(self._demand_key, self._name, mine)
        keep_ms = round(_LEASE_INTERVALS * config.interval_s * 1000)
        # Endpoint pickers, HTTP fronts and gRPC replicas write their demand, but cannot be leader.
        may_lead = self._config.gateway.is_router and self._config.api != "grpc"
        lead = may_lead and await self._lead(redis, [self._leader_key], self._name, keep_ms)
        if not lead:
            self._policy = None
            encoded = await redis.get(self._decisions_key)
            self._view.decisions = msgspec.json.decode(encoded or b"[]", type=list[ScalingDecision])
            return
        num_held = await self._sum_demand()
        owned: dict[str, int] = {}  # pool -> size, of the pools whose sizes this router can set
        try:
            owned = await self._owner.sizes()
        except TandemError as error:
            log.warning(
                "the autoscaler cannot read pool sizes (%s), so it does not change them",
                error.message,
            )
        self._view.decisions = decisions = self._decide(num_held, owned)
        await redis.set(self._decisions_key, msgspec.json.encode(decisions), px=keep_ms)
        changes: dict[str, int] = {
            # Example: the owner's size of the decode pool is 3, and 1 worker was moved there from
            # the prefill pool, so `d.size` is 4. To reach 6 workers, the owner's size becomes 5.
            d.role: max(0, owned[d.role] + d.to - d.size)
            for d in decisions
            if d.to != d.size and d.role in owned
        }
        if changes and config.mode == "on":
            who = Caller(f"autoscaler of {self._config.router_id}")
            await self._owner.set_sizes(changes, who=who)

    async def _sum_demand(self) -> int:
        """Adds to `_total` the demand on all routers since the last call.

        Returns the number of requests that all routers hold because a pool is empty.
        """
        redis = self._view.redis
        now = time.time()
        is_first = self._policy is None
        num_held = 0
        seen = dict[str, Demand]()
        for field, value in (await redis.hgetall(self._demand_key)).items():
            assert isinstance(value, bytes)
            try:
                written_at, holds, demand = msgspec.msgpack.decode(value, type=_DemandRecord)
            except UNREADABLE as error:
                log.warning(
                    "a router's report of its requests cannot be read, so the autoscaler ignores "
                    "this report: %s",
                    error,
                )
                await redis.hdel(self._demand_key, field)
                continue
            if now - written_at > _GONE_AFTER_S:
                await redis.hdel(self._demand_key, field)
                continue
            name = field.decode(errors="replace") if isinstance(field, bytes) else field
            num_held += holds if now - written_at < 3 * self._config.autoscale.interval_s else 0
            seen[name] = demand
            if not is_first:  # a new leader does not know yet how much the counters have grown
                self._total = self._total.plus(demand.since(self._last.get(name, Demand())))
        self._last = seen
        return num_held

    def _decide(self, num_held: int, owned: dict[str, int]) -> list[ScalingDecision]:
        now_s = time.monotonic()
        if self._policy is None:
            log.info(
                "this router runs the autoscaler%s now: mode %s",
                f" of the group {self._config.group}" if self._config.group else "",
                self._config.autoscale.mode,
            )
            self._policy = Autoscaler(self._config.autoscale, now_s)
        workers = self._view.snapshots()
        seen = Observation(
            now_s=now_s,
            demand=self._total,
            prefill=see_pool("prefill", workers, wanted=self._size("prefill", owned)),
            decode=see_pool("decode", workers, wanted=self._size("decode", owned)),
            decode_rate=likely_decode(workers),
            num_held=num_held,
        )
        decisions = list(self._policy.decide(seen))
        for decision in decisions:
            if decision.to != decision.size:
                log.info("autoscaler (mode %s): %s", self._config.autoscale.mode, decision.line)
        return decisions

    def _size(self, role: str, owned: dict[str, int]) -> int:
        """Returns the current size of a pool for the policy.

        If the owner of the size is known, the result is the owner's size, plus the workers that
        were moved into the pool from the other pool, minus those that were moved out. Otherwise the
        result is the last decided size. The number of running workers would be wrong: new workers
        take time to start, and meanwhile the policy would request them again.
        """
        records = [w.record for w in self._view.known()]
        if role not in owned:
            decided: dict[str, int] = {d.role: d.to for d in self._view.decisions}
            counted = sum(r.role == role and r.state != "draining" for r in records)
            return decided.get(role, counted)
        lent = [r for r in records if r.pool and r.pool != r.role]
        return owned[role] + sum(1 if r.role == role else -1 for r in lent)


class AutoscaleGauges(Collector):
    """Metrics of the sizes that the pools should have, for operators, an HPA or KEDA."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        decisions = self._view.decisions
        yield gauges(
            "tandem_desired_workers",
            "Size that the autoscaler wants for the pool now",
            ["role"],
            [((d.role,), d.to) for d in decisions],
        )
        yield gauges(
            "tandem_wanted_workers",
            "Size that the autoscaler's signals ask for, before it is stabilized",
            ["role", "reason"],
            [((d.role, d.why), d.wanted) for d in decisions],
        )
