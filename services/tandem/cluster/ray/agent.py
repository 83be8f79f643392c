"""The agent of one process of a pool: a small detached Ray actor that keeps it running.

    start or adopt -> running -> (it ended) restarting, after a back-off -> start -> ...
       |                 `drain` -> SIGTERM, at its deadline SIGKILL -> gone
       `(on its way out already) adopt, SIGTERM, ... or gone at once: it is never started

The process is not the agent's child: it goes on when the agent, the raylet or the whole of Ray
ends, and an agent that Ray starts again finds it by its record. Whether it is to run at all is in
the controller's file: `drain` may have come to an agent that is dead. The watch is a thread that
sleeps in poll(2); each change is told to the controller, nothing is sent while nothing changes.
"""

import logging
import os
import select
import threading
import time
from pathlib import Path

import ray

from tandem.backoff import Backoff, doubling
from tandem.cluster.pools import ClusterSpec, Member, MemberState
from tandem.cluster.processes import owned, process
from tandem.cluster.processes.process import DetachedProcess
from tandem.errors import ConfigError
from tandem.observability.logs import configure_logging

log = logging.getLogger(__name__)

CONTROLLER_NAME = "pool-controller"
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
HEALTHY_AFTER_S = 60.0  # a process that ran this long starts its back-off anew


class Agent:
    """Keeps one process running; the pool controller makes it as actor `member.agent_name`."""

    def __init__(self, spec: ClusterSpec, member: Member) -> None:
        configure_logging(member.agent_name)
        self._spec = spec
        self._member = member
        self._run_folder = Path(spec.run_folder)
        self._command = spec.pools[member.pool].filled(member)
        self._wake_fd = os.eventfd(0)  # readable from `drain` on
        self._state: MemberState = "pending"
        self._pid = 0
        self._num_starts = 0
        self._last_line = ""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def drain(self) -> None:
        """Ends the process for good; the agent reports `gone` when that is done."""
        os.eventfd_write(self._wake_fd, 1)

    def status(self) -> tuple[str, MemberState, int, int, str]:
        """Returns (agent's name, state, pid, starts, last log line of a process that ended), as the
        controller is told."""
        name = self._member.agent_name
        return name, self._state, self._pid, self._num_starts, self._last_line

    def _run(self) -> None:
        backoff = Backoff(doubling(BACKOFF_FIRST_S, BACKOFF_MAX_S))
        while True:
            started_at = time.monotonic()
            running = self._find()
            known = owned.read(self._run_folder)
            if known is not None and not known.wants(self._member.agent_name):
                if running is not None:
                    self._stop(running)
                else:
                    self._tell("gone", 0)
                return
            running = running or self._start()
            if running is not None:
                self._tell("running", running.pid)
                if not running.wait(None, self._wake_fd):
                    self._stop(running)
                    return
                running.close()
                self._last_line = process.last_line(running.log_path)
                log.warning("%s ended; its log is %s", running.process_id, running.log_path)
            if time.monotonic() - started_at > HEALTHY_AFTER_S:
                backoff.reset()
            self._tell("restarting", 0)
            if select.select([self._wake_fd], [], [], backoff.next_s())[0]:
                self._tell("gone", 0)
                return

    def _find(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        if (found := process.find(member_id, self._run_folder)) is not None:
            log.info("%s runs already as process %d: adopted", member_id, found.pid)
        return found

    def _start(self) -> DetachedProcess | None:
        member_id = self._member.member_id
        try:
            self._num_starts += 1
            environment = process.child_environment(os.environ, self._member.pool)
            return process.start(member_id, self._command, self._run_folder, environment)
        except (ConfigError, OSError) as error:
            log.error("%s cannot be started: %s", member_id, error)
            return None

    def _stop(self, running: DetachedProcess) -> None:
        self._tell("draining", running.pid)
        running.stop(self._spec.drain_deadline_s)
        running.close()
        self._tell("gone", 0)

    def _tell(self, state: MemberState, pid: int) -> None:
        self._state, self._pid = state, pid
        try:
            controller = ray.get_actor(CONTROLLER_NAME)
            controller.report.remote(*self.status())
        except (ValueError, ray.exceptions.RayError) as error:
            # The controller asks every agent when it comes up again.
            log.warning("the pool controller does not hear that this is %s: %s", state, error)
