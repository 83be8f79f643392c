"""Connects the pool controller to Redis: reads scale requests and publishes the state of the pools.

  key                          content
  {tandem:CLUSTER}:scale       LIST of scale requests, such as {"decode": 3}
  {tandem:CLUSTER}:pools       STRING, the state of the pools as JSON (`pool_state.describe`)
  {tandem:CLUSTER}:controller  STRING, the heartbeat of the controller (store/control_state.py)

Routers append requests to the list with LPUSH, so they do not need Ray. The controller takes them
with BRPOP. If several requests have waited, only the newest size of each pool counts.

The other two keys are written on each change, and each time BRPOP returns, because Redis may have
lost them. While Redis is unreachable, routers can neither send requests nor read the state. The
channel tries again, and the controller continues.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import msgspec

from tandem.cluster.processes.head_lease import LEASE_S, fenced_set
from tandem.cluster.processes.vital_thread import start_vital
from tandem.common.config.cluster import PoolName
from tandem.common.pool_sizes import check_sizes, sized_pools
from tandem.errors import BadRequest
from tandem.net.store.client import REPLY_TIMEOUT_S, UNREACHABLE, SyncClient, connect_blocking
from tandem.net.store.control_state import (
    BEAT_INTERVAL_S,
    CONTROLLER_KEY,
    ControllerBeat,
    control_key,
)

log = logging.getLogger(__name__)

_TAKE_TIMEOUT_S = BEAT_INTERVAL_S
_RETRY_INTERVAL_S = 1.0
_TAKE_MAX = 1000


class ScaleChannel:
    """Reads scale requests in a thread of its own and calls `on_sizes` with valid sizes. `publish`
    writes the state."""

    def __init__(
        self,
        redis_url: str,
        cluster_id: str,
        on_sizes: Callable[[dict[PoolName, int]], None],
        pools: Iterable[PoolName] = (),
        *,
        number: int = 0,
    ) -> None:
        """`pools` are the cluster's pools. `number` is the fencing number of the controller's
        head; 0 on a single machine."""
        self._cluster_id = cluster_id
        self._number = number
        self.is_superseded = False
        self._requests = f"{{tandem:{cluster_id}}}:scale"
        self._num_beats = 0
        self._on_sizes = on_sizes
        self._pools = sized_pools(pools)
        self._state: dict[str, object] | None = None
        self._lost = False
        self._redis_url = redis_url

    def start(self) -> None:
        start_vital("scale-requests", self._run)

    def publish(self, state: dict[str, object]) -> None:
        """Writes the state now, or as soon as Redis is reachable."""
        self._state = state
        try:
            if not self._write():
                self.supersede()
        except UNREACHABLE as error:
            self._note_lost(error)

    def supersede(self) -> None:
        """Ends the channel, because the controller of a later head handles the requests now."""
        self.is_superseded = True

    def _run(self) -> None:
        # Requests that were taken from Redis, but not handled yet. The next write shows whether the
        # controller of another head has taken over. If not, the requests are handled. If so, they
        # are put back into Redis for the other controller. Requests that were taken more than
        # LEASE_S ago are dropped instead, because the other controller may have handled newer ones
        # already.
        taken: list[bytes | str] = []
        taken_at = 0.0
        while taken or not self.is_superseded:
            try:
                if self.is_superseded or not self._write():
                    if taken and time.monotonic() - taken_at < LEASE_S:
                        self._redis.rpush(self._requests, *reversed(taken))
                    self.supersede()
                    return
                self._take(taken)
                taken = []
                first = self._redis.brpop([self._requests], timeout=_TAKE_TIMEOUT_S)
                if first is not None:
                    taken = [first[1], *self._waiting()]
                    taken_at = time.monotonic()
                if self._lost:
                    log.info("Redis answers again")
                    self._lost = False
            except UNREACHABLE as error:
                self._note_lost(error)
                time.sleep(_RETRY_INTERVAL_S)

    def _waiting(self) -> Sequence[bytes | str]:
        try:
            taken = self._redis.rpop(self._requests, _TAKE_MAX)
        except UNREACHABLE:  # `_run` uses Redis next and handles the same error
            return ()
        return taken if isinstance(taken, list) else ()

    def _take(self, bodies: Sequence[bytes | str]) -> None:
        """Merges requests, so that the newest size of each pool counts, and calls `on_sizes`."""
        sizes: dict[PoolName, int] = {}
        for body in bodies:
            try:
                sizes |= check_sizes(json.loads(body), self._pools)
            except (ValueError, BadRequest) as error:
                log.error("a scale request was refused: %s", error)
        if sizes:
            self._on_sizes(sizes)

    def _write(self) -> bool:
        """Writes the heartbeat, and the state if there is one. Returns False if another head with a
        higher fencing number has taken over."""
        self._num_beats += 1
        beat = ControllerBeat(os.getpid(), self._num_beats, self._number)
        values: dict[str, bytes | str] = {CONTROLLER_KEY: msgspec.json.encode(beat)}
        if self._state is not None:
            values["pools"] = json.dumps(self._state)
        if self._number:
            return fenced_set(self._redis, self._cluster_id, self._number, values)
        for name, value in values.items():
            self._redis.set(control_key(self._cluster_id, name), value)
        return True

    @cached_property
    def _redis(self) -> SyncClient:
        """The Redis client. It is not created before its first use, because a client of a Redis
        Cluster connects as soon as it is created."""
        reply_timeout_s = _TAKE_TIMEOUT_S + REPLY_TIMEOUT_S
        return connect_blocking(self._redis_url, reply_timeout_s=reply_timeout_s)

    def _note_lost(self, error: BaseException) -> None:
        if not self._lost:
            log.warning("Redis does not answer (%s), so the pools stay as they are", error)
        self._lost = True
