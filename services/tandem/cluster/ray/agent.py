"""The agent of one process of a pool: a small detached Ray actor that keeps the process running.

  state        meaning                                            next state
  running      the process runs                                   restarting, if the process ends
  restarting   the agent waits (back-off), then starts it again   running
  draining     the process got SIGTERM; SIGKILL at the deadline   gone
  gone         the process has ended for good

A new agent takes over its process if the process already runs; otherwise the agent starts the
process. `drain` makes a running process drain. A process that is not wanted any more when its agent
starts is drained, or not started.

With several hosts, a router first receives LEAVE_SIGNAL. It then reports to its clients that it
leaves, and is drained `leave_notice_s` later.

A Ray node that is about to end is marked (leave_node.py). The agents of the node then drain their
processes and start none. The agents remain until the node ends, so that Ray places nothing else on
the node.

The process is not a child of the agent: it continues if the agent, the raylet or all of Ray ends,
and a restarted agent finds it by its record. A restarted agent reads from the controller's state
(owned.py) whether the process should still run, because only the earlier agent may have received
`drain`. A thread watches the process: it sleeps in poll(2) and checks every 2 s whether the process
is stopped. The agent reports each change to the controller, and sends nothing while nothing
changes.
"""

import logging
import os
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import ray

from tandem.cluster.gpus import with_gpus
from tandem.cluster.pools import ClusterSpec, Member, MemberState
from tandem.cluster.processes import leave_node, owned, process
from tandem.cluster.processes.owned import Owned, SharedOwned, read_spec
from tandem.cluster.processes.process import DetachedProcess
from tandem.cluster.ray.vital_thread import start_vital
from tandem.common.config.cluster import (
    LEAVE_SIGNAL,
    REDIS_URL_VARIABLE,
    ROUTER_POOLS,
    RUN_FOLDER_VARIABLE,
)
from tandem.common.process import endings, own_files
from tandem.errors import ConfigError
from tandem.net.observability.logs import configure_logging

log = logging.getLogger(__name__)

CONTROLLER_NAME = "pool-controller"
_CHECK_INTERVAL_S = 2.0
_STOPPED = {True: "is suspended, for example by SIGSTOP", False: "runs again"}
# if a process ran for this many seconds, its restarts begin again with the shortest pause
HEALTHY_AFTER_S = 60.0


class Agent:
    """Keeps one process running. The pool controller creates it as the actor
    `member.agent_name`."""

    def __init__(self, spec: ClusterSpec, member: Member) -> None:
        configure_logging(member.agent_name)
        if spec.on_nodes:
            folder = os.environ.get(RUN_FOLDER_VARIABLE, spec.run_folder)
            # The records of this node's processes are written to this folder.
            own_files.make_folder(Path(folder))
            spec = msgspec.structs.replace(spec, run_folder=folder)
        elif member.host:
            # `spec` describes the host of the controller. The spec of this host is in its run
            # folder.
            spec = read_spec(Path(os.environ[RUN_FOLDER_VARIABLE]))
        self._spec = spec
        self._member = member
        self._run_folder = Path(spec.run_folder)
        self._shared = SharedOwned(os.environ.get(REDIS_URL_VARIABLE, ""), spec.cluster_id, 0)
        self._command = spec.pools[member.pool].filled(member)
        if spec.on_nodes:
            self._command = [expand(word, os.environ) for word in self._command]
        self._wake_fd = os.eventfd(0)  # becomes readable when `drain` is called
        self._state: MemberState = "pending"
        self._pid = 0
        self._num_starts = 0  # number of restarts; the first start does not count
        # True: the process was started before, perhaps by an earlier agent. The next start is a
        # restart.
        self._was_started = member.state != "pending"
        self._last_line = ""
        self._ending = ""
        self._is_stopped = False
        start_vital("watch", self._run)

    def drain(self) -> None:
        """Ends the process permanently. The agent reports `gone` when it has ended."""
        os.eventfd_write(self._wake_fd, 1)

    def status(self) -> tuple[str, MemberState, int, int, str, str, bool]:
        """Returns the report of this agent: (agent name, state, pid, number of restarts, what the
        previous process logged about its failure, how that process ended, whether the process is
        stopped)."""
        name = self._member.agent_name
        last = (self._last_line, self._ending)
        return name, self._state, self._pid, self._num_starts, *last, self._is_stopped

    def _run(self) -> None:
        backoff = process.restart_backoff()
        while True:
            started_at = time.monotonic()
            running = self._find()
            if self._node_is_ending():
                self._end_with_node(running)
                return
            known = self._read_owned()
            if known is not None and not known.wants(self._member.agent_name):
                if running is not None:
                    self._stop(running)
                else:
                    self._report("gone", 0)
                return
            self._was_started |= known is not None and known.was_started(self._member.agent_name)
            running = running or self._start()
            self._was_started = True
            if running is not None:
                self._report("running", running.pid)
                if not self._watch(running):
                    self._stop(running)
                    return
                if self._node_is_ending():
                    continue
            if time.monotonic() - started_at > HEALTHY_AFTER_S:
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
            if running.is_stopped != self._is_stopped:
                self._is_stopped = not self._is_stopped
                log.warning("%s %s", running.process_id, _STOPPED[self._is_stopped])
                self._report("running", running.pid)
        self._is_stopped = False
        self._ending = running.ending(oom_kills)
        self._last_line = process.last_warning(running.log_path)
        running.close()
        log.warning(
            "%s ended (%s); its log is %s",
            running.process_id,
            self._ending or "the cause is unknown",
            running.log_path,
        )
        return True

    def _read_owned(self) -> Owned | None:
        if self._spec.on_nodes:
            # Nodes cannot read the controller's state. The controller sends `drain` to the agents
            # of unwanted processes instead.
            return None
        if not self._member.host:
            return owned.read(self._run_folder)
        return self._shared.read()

    def _find(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        if (found := process.find(member_id, self._run_folder)) is not None:
            log.info(
                "%s already runs as process %d; this Ray actor now watches that process",
                member_id,
                found.pid,
            )
        return found

    def _start(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        try:
            self._num_starts += self._was_started
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
        self._state = state
        self._pid = pid
        try:
            controller = ray.get_actor(CONTROLLER_NAME)
            controller.report.remote(*self.status())
        except (ValueError, ray.exceptions.RayError) as error:
            # This report is lost. A restarted controller requests the status of every agent.
            log.warning(
                "cannot report to the pool controller that %s is %s: %s",
                self._member.member_id,
                state,
                error,
            )


def expand(word: str, variables: Mapping[str, str]) -> str:
    """Replaces each $(NAME) by the node's environment variable of that name, like Kubernetes."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)
