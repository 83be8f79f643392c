"""Keeps the processes of one host running. Each process has a keeper, which is a thread.

  state        meaning                                             next state
  running      the process runs                                    restarting, if the process ends
  restarting   the keeper waits (back-off), then starts it again   running
  draining     the process got SIGTERM; SIGKILL at the deadline    gone
  gone         the process has ended for good

A new keeper takes over its process if the process already runs; otherwise the keeper starts the
process. `drain` makes a running process drain. A process that is not wanted any more when its
keeper starts is drained, or not started.

With several hosts, a router first receives LEAVE_SIGNAL. It then reports to its clients that it
leaves, and is drained `leave_notice_s` later.

A Ray node that is about to end is marked (leave_node.py). The keepers of the node then drain their
processes and start none.

The process is not a child of this one: it continues if this process, the raylet or all of Ray ends,
and a new keeper finds it by its record. A new keeper reads from the controller's state (owned.py)
whether the process should still run, because only the earlier keeper may have received `drain`. The
keeper sleeps in poll(2) and checks every 2 s whether the process is stopped. It reports each
change, and nothing while nothing changes.
"""

import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tandem.cluster.gpus import with_gpus
from tandem.cluster.pools import ClusterSpec, Member, MemberState
from tandem.cluster.processes import leave_node, owned, process
from tandem.cluster.processes.owned import Owned, SharedOwned
from tandem.cluster.processes.process import DetachedProcess
from tandem.cluster.processes.vital_thread import start_vital
from tandem.common.config.cluster import LEAVE_SIGNAL, REDIS_URL_VARIABLE, ROUTER_POOLS
from tandem.common.process import endings
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 2.0
_STOPPED = {True: "is suspended, for example by SIGSTOP", False: "runs again"}


class Report(msgspec.Struct, frozen=True):
    """The state of one process, as its keeper reports it."""

    keeper_name: str
    state: MemberState
    pid: int = 0
    num_starts: int = 0  # number of restarts; the first start does not count
    last_line: str = ""  # what the previous process logged about its failure
    ending: str = ""  # how the previous process ended
    is_stopped: bool = False  # True: a signal such as SIGSTOP has stopped the process


class Keepers:
    """The keepers of one host's processes."""

    def __init__(self, spec: ClusterSpec, report: Callable[[Report], None]) -> None:
        """`spec` is the one of this host. The keepers' threads call `report`."""
        self._spec = spec
        self._report = report
        self._shared = SharedOwned(os.environ.get(REDIS_URL_VARIABLE, ""), spec.cluster_id, 0)
        self._keepers: dict[str, Keeper] = {}
        self._lock = threading.Lock()

    def keep(self, member: Member) -> None:
        """Keeps the member's process running until `drain`. Does nothing if its keeper exists."""
        with self._lock:
            if member.keeper_name not in self._keepers:
                keeper = Keeper(self._spec, member, self._take, self.read_owned)
                self._keepers[member.keeper_name] = keeper

    def drain(self, keeper_name: str) -> None:
        """Ends a process permanently. Does nothing if it has no keeper."""
        with self._lock:
            if (keeper := self._keepers.get(keeper_name)) is not None:
                keeper.drain()

    def read_owned(self) -> Owned | None:
        """Reads the controller's state. Returns None if it cannot be read here."""
        if self._spec.on_nodes:
            # Nodes cannot read the controller's state. The controller drains the processes that
            # are not wanted any more instead.
            return None
        if not self._spec.host_id:
            return owned.read(Path(self._spec.run_folder))
        return self._shared.read()

    def _take(self, report: Report) -> None:
        if report.state == "gone":
            with self._lock:
                if (keeper := self._keepers.pop(report.keeper_name, None)) is not None:
                    keeper.close()
        self._report(report)


class Keeper:
    """Keeps one process running, in a thread of its own."""

    def __init__(
        self,
        spec: ClusterSpec,
        member: Member,
        report: Callable[[Report], None],
        read_owned: Callable[[], Owned | None],
    ) -> None:
        self._spec = spec
        self._member = member
        self._report_to = report
        self._read_owned = read_owned
        self._run_folder = Path(spec.run_folder)
        self._command = spec.pools[member.pool].filled(member)
        if spec.on_nodes:
            self._command = [expand(word, os.environ) for word in self._command]
        self._wake_fd = os.eventfd(0)  # becomes readable when `drain` is called
        # What an earlier keeper reported of the process stays known.
        self._last = Report(
            member.keeper_name,
            "pending",
            num_starts=member.num_starts,
            last_line=member.last_line,
            ending=member.ending,
        )
        # True: the process was started before, perhaps by an earlier keeper. The next start is a
        # restart.
        self._was_started = member.state != "pending"
        start_vital(f"keeper-{member.member_id}", self._run)

    def drain(self) -> None:
        """Ends the process permanently. The keeper reports `gone` when it has ended."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Is called once, when the process is gone. `drain` must not be called any more."""
        os.close(self._wake_fd)

    def _run(self) -> None:
        backoff = process.restart_backoff()
        while True:
            started_at = time.monotonic()
            running = self._find()
            if self._node_is_ending():
                self._end_with_node(running)
                return
            known = self._read_owned()
            if known is not None and not known.wants(self._member.keeper_name):
                if running is not None:
                    self._stop(running)
                else:
                    self._report("gone", 0)
                return
            self._was_started |= known is not None and known.was_started(self._member.keeper_name)
            running = running or self._start()
            self._was_started = True
            if running is not None:
                self._report("running", running.pid)
                if not self._watch(running):
                    self._stop(running)
                    return
                if self._node_is_ending():
                    continue
            if time.monotonic() - started_at > process.HEALTHY_AFTER_S:
                backoff.reset()
            self._report("restarting", 0)
            if select.select([self._wake_fd], [], [], backoff.next_s())[0]:
                self._report("gone", 0)
                return

    def _node_is_ending(self) -> bool:
        return self._spec.on_nodes and leave_node.leaves(self._run_folder)

    def _end_with_node(self, running: DetachedProcess | None) -> None:
        if running is not None:
            self._stop(running)
        else:
            self._report_ended()

    def _watch(self, running: DetachedProcess) -> bool:
        """Waits until the process ends by itself, and records how. Returns False on `drain` or if
        the node is about to end."""
        oom_kills = endings.oom_kills()
        while not running.wait(_CHECK_INTERVAL_S, self._wake_fd):
            if select.select([self._wake_fd], [], [], 0)[0] or self._node_is_ending():
                return False
            oom_kills = endings.oom_kills()
            if running.is_stopped != self._last.is_stopped:
                is_stopped = not self._last.is_stopped
                log.warning("%s %s", running.process_id, _STOPPED[is_stopped])
                self._last = msgspec.structs.replace(self._last, is_stopped=is_stopped)
                self._report("running", running.pid)
        self._last = msgspec.structs.replace(
            self._last,
            is_stopped=False,
            ending=running.ending(oom_kills),
            last_line=process.last_warning(running.log_path),
        )
        running.close()
        log.warning(
            "%s ended (%s); its log is %s",
            running.process_id,
            self._last.ending or "the cause is unknown",
            running.log_path,
        )
        return True

    def _find(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        if (found := process.find(member_id, self._run_folder)) is not None:
            log.info("%s already runs as process %d, which is watched now", member_id, found.pid)
        return found

    def _start(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        try:
            num_starts = self._last.num_starts + self._was_started
            self._last = msgspec.structs.replace(self._last, num_starts=num_starts)
            environment = process.child_environment(os.environ, self._member.pool)
            environment = with_gpus(environment, self._member.gpus)
            return process.start(member_id, self._command, self._run_folder, environment)
        except (ConfigError, OSError) as error:
            log.error("%s cannot be started: %s", member_id, error)
            return None

    def _stop(self, running: DetachedProcess) -> None:
        self._report("draining", running.pid)
        if self._member.pool in ROUTER_POOLS and self._member.host:
            # The router's clients can switch to other hosts once they see that this router leaves.
            running.send(LEAVE_SIGNAL)
            running.wait(self._spec.leave_notice_s)
        running.stop(self._spec.drain_deadline_s)
        running.close()
        self._report_ended()

    def _report_ended(self) -> None:
        """Reports that the process has ended: "gone", or "draining" if the node is about to end.
        For a "gone" member the controller would remove the agent, and Ray could use the resources
        of the agent for another process on the ending node.
        """
        self._report("draining" if self._node_is_ending() else "gone", 0)

    def _report(self, state: MemberState, pid: int) -> None:
        self._last = msgspec.structs.replace(self._last, state=state, pid=pid)
        self._report_to(self._last)


def expand(word: str, variables: Mapping[str, str]) -> str:
    """Replaces each $(NAME) by the node's environment variable of that name, like Kubernetes."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)
