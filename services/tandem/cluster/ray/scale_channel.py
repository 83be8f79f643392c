"""The pool controller's side of Redis: scale requests come in, the pools' state goes out.

    {tandem:CLUSTER}:scale   LIST of JSON sizes, LPUSHed by routers, taken by BRPOP; of what had to
                             wait for a controller the newest sizes count, the others never were
    {tandem:CLUSTER}:pools   STRING, JSON of `pools.describe`, written on each change, and again
                             whenever BRPOP comes back: a Redis that lost it gets it anew

Routers ask here so that they need no Ray. While Redis is lost nobody can ask and nobody can read:
the channel tries again, and the controller does not notice.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property

from tandem.config.cluster import Pool
from tandem.errors import BadRequest
from tandem.pool_sizes import check_sizes
from tandem.store.client import REPLY_TIMEOUT_S, UNREACHABLE, SyncClient, connect_blocking

log = logging.getLogger(__name__)

_TAKE_TIMEOUT_S = 15
_RETRY_INTERVAL_S = 1.0
_TAKE_MAX = 1000


class ScaleChannel:
    """Calls `on_sizes`, in a thread of its own, with sizes that make sense."""

    def __init__(
        self, redis_url: str, cluster_id: str, on_sizes: Callable[[dict[Pool, int]], None]
    ) -> None:
        self._requests = f"{{tandem:{cluster_id}}}:scale"
        self._pools = f"{{tandem:{cluster_id}}}:pools"
        self._on_sizes = on_sizes
        self._state: dict[str, object] | None = None
        self._lost = False
        self._redis_url = redis_url

    def start(self) -> None:
        threading.Thread(target=self._run, name="scale-requests", daemon=True).start()

    def publish(self, state: dict[str, object]) -> None:
        """Writes the state now, or as soon as Redis is there again."""
        self._state = state
        try:
            self._write()
        except UNREACHABLE as error:
            self._note_lost(error)

    def _run(self) -> None:
        while True:
            try:
                self._write()
                first = self._redis.brpop([self._requests], timeout=_TAKE_TIMEOUT_S)
            except UNREACHABLE as error:
                self._note_lost(error)
                time.sleep(_RETRY_INTERVAL_S)
                continue
            if self._lost:
                log.info("Redis answers again")
                self._lost = False
            if first is not None:
                self._take([first[1], *self._waiting()])

    def _waiting(self) -> Sequence[bytes | str]:
        try:
            taken = self._redis.rpop(self._requests, _TAKE_MAX)
        except UNREACHABLE:  # BRPOP finds that, too
            return ()
        return taken if isinstance(taken, list) else ()

    def _take(self, bodies: Sequence[bytes | str]) -> None:
        """Merges requests, oldest first, and passes the sizes on."""
        sizes: dict[Pool, int] = {}
        for body in bodies:
            try:
                sizes |= check_sizes(json.loads(body))
            except (ValueError, BadRequest) as error:
                log.error("a scale request is refused: %s", error)
        if sizes:
            self._on_sizes(sizes)

    def _write(self) -> None:
        if self._state is not None:
            self._redis.set(self._pools, json.dumps(self._state))

    @cached_property
    def _redis(self) -> SyncClient:
        """The client, made on first use: one of a Cluster connects when it is made."""
        reply_timeout_s = _TAKE_TIMEOUT_S + REPLY_TIMEOUT_S
        return connect_blocking(self._redis_url, reply_timeout_s=reply_timeout_s)

    def _note_lost(self, error: BaseException) -> None:
        if not self._lost:
            log.warning("Redis is lost, pools stay as they are: %s", error)
        self._lost = True
