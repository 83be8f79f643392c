"""Waits until a starting cluster can take requests, and reports how long each part took.

A cluster is ready when the routers answer and every worker's record says ready. The workers connect
with each other afterwards; until then, decode workers prefill prompts themselves. The start fails
if a process ends before the cluster is ready (the error has the end of the process's log), or if
there is no progress for too long.
"""

import ssl
import time
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.pools import Member
from tandem.cluster.processes import process
from tandem.cluster.processes.process import DetachedProcess
from tandem.common.config.cluster import ROUTER_POOLS, role_of
from tandem.common.process.progress import ProgressRow
from tandem.errors import ConfigError
from tandem.net.store.client import UNREACHABLE, SyncClient, connect_blocking
from tandem.net.store.registry import LoadingNotice, WorkerRecord

_DEADLINE_S = 300.0  # limit without progress; loading weights of a large model counts as progress
_INTERVAL_S = 0.05
_REPLY_DEADLINE_S = 2.0


@dataclass(slots=True)
class Readiness:
    options: LaunchOptions
    cluster_id: str
    redis_url: str = field(repr=False)
    screen: LaunchScreen
    records: list[WorkerRecord] = field(default_factory=list)  # set once all workers are ready
    members: list[Member] = field(default_factory=list)
    _waiting: dict[str, tuple[Member, DetachedProcess, float]] = field(default_factory=dict)

    def add(self, member: Member, started: DetachedProcess) -> None:
        self.members.append(member)
        self._waiting[member.member_id] = (member, started, time.monotonic())

    def wait(self) -> None:
        """Waits until all processes are ready. Raises ConfigError that names the failed process and
        has the end of its log."""
        progress = (0, 0)
        moved_at = time.monotonic()
        with closing(connect_blocking(self.redis_url)) as redis:
            while self._waiting:
                for member_id in [m for m in self._waiting if self._is_ready(m, redis)]:
                    _, started, began = self._waiting.pop(member_id)
                    started.close()
                    self.screen.done(member_id, time.monotonic() - began)
                for member_id, (_, started, _) in self._waiting.items():
                    if started.wait(0):
                        raise process.failed_start(member_id, started.log_path)
                loaded, to_load = self._bytes_loaded(redis)
                self.screen.wait_for(*self._steps(loaded, to_load))
                now = len(self._waiting), loaded
                if now != progress:
                    progress = now
                    moved_at = time.monotonic()
                if time.monotonic() - moved_at > _DEADLINE_S:
                    raise ConfigError(
                        f"the start made no progress for {_DEADLINE_S:g} s while it waited for "
                        f"{self._awaited()}; see the logs in {self._log_folder()}"
                    )
                time.sleep(_INTERVAL_S)
            workers = [m.member_id for m in self.members if m.pool not in ROUTER_POOLS]
            records = [self._record(m, redis) for m in workers]
            self.records = [r for r in records if r is not None and r.has_kv]

    def _steps(self, loaded: int, to_load: int) -> list[ProgressRow]:
        """Builds the progress rows: how many processes are ready, and how many bytes of weights are
        loaded."""
        total = len(self.members)
        ready = total - len(self._waiting)
        if not self._waiting:
            return []
        note = f"{ready} of {total} ready; waiting for {self._awaited()}"
        steps = [ProgressRow("processes", note, ready, total)]
        if loaded < to_load:
            progress = f"{loaded / to_load:.0%} of {to_load / 1e9:.3g} GB"
            steps.append(ProgressRow("weights", progress, loaded, to_load))
        return steps

    def _awaited(self) -> str:
        """Lists the processes that are not ready yet. Routers are listed only if all workers are
        ready, because a router becomes ready when a decode worker does."""
        workers = [m for m, (each, _, _) in self._waiting.items() if each.pool not in ROUTER_POOLS]
        return ", ".join(workers or self._waiting)

    def _log_folder(self) -> Path:
        return next(started.log_path.parent for _, started, _ in self._waiting.values())

    def _is_ready(self, member_id: str, redis: SyncClient) -> bool:
        member = self._waiting[member_id][0]
        if member.pool in ROUTER_POOLS:
            url = self.options.http_url if member.pool == "router" else self._url(member_id, redis)
            try:
                # The certificate is not verified: it names another host, and this request has no
                # secret.
                context = ssl._create_unverified_context()
                ready = f"{url}/ready"
                with urllib.request.urlopen(ready, timeout=_REPLY_DEADLINE_S, context=context):
                    return True
            except urllib.error.HTTPError:
                # The router is up, but not ready. That is enough if all decode workers are on other
                # machines, because the router may be waiting for them.
                return all(role_of(m.pool) != "decode" for m in self.members)
            except (OSError, ValueError):  # no answer, or the URL is not announced yet
                return False
        record = self._record(member_id, redis)
        return record is not None and record.state == "ready"

    def _url(self, router_id: str, redis: SyncClient) -> str:
        """Reads the URL that a router announced (store/router_registry.py); empty if it has none
        yet."""
        try:
            entry = redis.hget(f"{{tandem:{self.cluster_id}}}:routers", router_id)
        except UNREACHABLE:
            return ""
        return entry.decode().partition(" ")[2] if isinstance(entry, bytes) else ""

    def _bytes_loaded(self, redis: SyncClient) -> tuple[int, int]:
        """Returns the bytes of weights that all workers have loaded so far, and the bytes that they
        will have loaded in the end."""
        try:
            found = redis.hvals(f"{{tandem:{self.cluster_id}}}:loading")
        except UNREACHABLE:
            return 0, 0
        notices = [
            msgspec.msgpack.decode(v, type=LoadingNotice) for v in found if isinstance(v, bytes)
        ]
        return sum(n.num_bytes for n in notices), sum(n.num_bytes_all for n in notices)

    def _record(self, member_id: str, redis: SyncClient) -> WorkerRecord | None:
        try:
            record = redis.get(f"{{tandem:{self.cluster_id}}}:worker:{member_id}")
        except UNREACHABLE:
            return None  # Redis is slow or unreachable; the caller tries again
        if not isinstance(record, bytes):
            return None
        return msgspec.msgpack.decode(record, type=WorkerRecord)
