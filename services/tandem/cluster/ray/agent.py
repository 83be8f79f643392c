"""Agents: detached Ray actors that keep the processes of other hosts running.

A host has one agent, which keeps all processes of its host running (processes/keeper.py). The host
of the pool controller has none, because the controller keeps the processes of its own host itself.
On nodes that Ray starts and ends (`ClusterSpec.on_nodes`), each process has an agent of its own,
which takes the resources of the process on the node.

Few agents are good: each Ray actor wakes 100 times a second and takes 0.6% of a core when idle.

If an agent ends, Ray starts it again. It then reads the controller's state, and keeps the processes
of its host before any controller calls it.

The controller calls `changes`, which returns when a process has changed its state. So a controller
that was restarted misses nothing, and nothing is sent while nothing changes.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray

from tandem.cluster.pools import ClusterSpec, Member
from tandem.cluster.processes.keeper import Keepers, Report
from tandem.cluster.processes.owned import read_spec
from tandem.cluster.processes.vital_thread import start_vital
from tandem.common.config.cluster import RUN_FOLDER_VARIABLE
from tandem.common.process import own_files
from tandem.net.observability.logs import configure_logging

log = logging.getLogger(__name__)

_RETRY_S = 2.0
_MAX_CALLS = 8  # calls that an agent handles at once; at most one call of `changes` waits

# The changes that a controller has received: (agent's random id, number of the last change).
Seen = tuple[str, int]
_NOTHING: Seen = ("", 0)


class Agent:
    """Keeps the processes of a host, or one process of a Ray node, running. `RemoteAgent` creates
    it as an actor."""

    def __init__(self, spec: ClusterSpec, member: Member | None) -> None:
        """`spec` is the controller's. `member` is the process of an agent on a Ray node; None: the
        agent keeps all processes of its host."""
        folder = Path(os.environ.get(RUN_FOLDER_VARIABLE, spec.run_folder))
        if spec.on_nodes:
            # The records of this node's processes are written to this folder.
            own_files.make_folder(folder)
            spec = msgspec.structs.replace(spec, run_folder=str(folder))
        else:
            spec = read_spec(folder)
        configure_logging(member.keeper_name if member else f"agent-{spec.host_id}")
        self._id = secrets.token_hex(8)
        self._num_changes = 0
        self._reports: dict[str, tuple[int, Report]] = {}  # keeper's name -> (number, last report)
        self._num_calls = 0  # calls of `changes`
        self._changed = threading.Condition()
        self._host_id = spec.host_id
        self._keepers = Keepers(spec, self._note)
        if member is not None:
            self._keepers.keep(member)
        else:
            start_vital("known processes", self._keep_known)

    def keep(self, member: Member) -> None:
        """Keeps the member's process running until `drain`."""
        self._keepers.keep(member)

    def drain(self, keeper_name: str) -> None:
        """Ends a process permanently. `changes` reports `gone` when it has ended."""
        self._keepers.drain(keeper_name)

    def changes(self, seen: Seen) -> tuple[Seen, list[Report]]:
        """Waits for changes after `seen`. Returns what the caller has seen then, and the last
        report of each process that has changed. Returns at once if `seen` is of another agent, and
        when the next call begins: then the caller of this one has ended."""
        with self._changed:
            self._num_calls += 1
            number = self._num_calls
            self._changed.notify_all()
            is_known = seen[0] == self._id
            since = seen[1] if is_known else 0
            # The caller has the reports up to `since`, so those of ended processes can go.
            self._reports = {
                name: (at, report)
                for name, (at, report) in self._reports.items()
                if at > since or report.state != "gone"
            }
            if is_known:
                self._changed.wait_for(
                    lambda: self._num_changes > since or self._num_calls > number
                )
            new = [report for at, report in self._reports.values() if at > since]
            return (self._id, self._num_changes), new

    def _note(self, report: Report) -> None:
        with self._changed:
            self._num_changes += 1
            self._reports[report.keeper_name] = self._num_changes, report
            self._changed.notify_all()

    def _keep_known(self) -> None:
        """Keeps the processes that the controller's state has for this host. Waits while Redis is
        unreachable or has no state."""
        while (known := self._keepers.read_owned()) is None:
            time.sleep(_RETRY_S)
        for member in known.members:
            if member.host == self._host_id and member.state != "lost":
                self._keepers.keep(member)


class RemoteAgent:
    """The controller's connection to an agent. All methods are called in the controller's
    thread."""

    def __init__(
        self,
        name: str,
        spec: ClusterSpec,
        member: Member | None,
        *,
        replaces: str,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        post: Callable[[Callable[[], None]], None],
        report: Callable[[Report], None],
    ) -> None:
        """Creates the actor `name` on a node with these labels, or connects to the existing one.
        Ends the actor `replaces` if there is one; its process continues.
        `post` runs a function in the controller's thread, and `report` gets each report there."""
        taken = dict(resources)
        self._actors = ray.remote(
            num_cpus=taken.pop("CPU", 0),
            num_gpus=taken.pop("GPU", 0),
            max_restarts=-1,
            max_task_retries=-1,  # calls wait while the agent is being restarted
            max_concurrency=_MAX_CALLS,
            lifetime="detached",
            resources=taken,
            label_selector=dict(labels),
        )(Agent)
        self._name = name
        self._started_with = (spec, member)
        with suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(replaces))
        self._actor = self._connect()
        self._agent_id = ""
        self._members: dict[str, Member] = {}  # keeper's name -> the member whose process is kept
        self._post = post
        self._report = report
        self._is_ended = False
        self._has_failed = False
        self._request_changes(_NOTHING)

    def keep(self, member: Member) -> None:
        self._members[member.keeper_name] = member
        self._log_failure(self._actor.keep.remote(member), f"keep {member.member_id} running")

    def drain(self, keeper_name: str) -> None:
        self._members.pop(keeper_name, None)
        self._log_failure(self._actor.drain.remote(keeper_name), f"end {keeper_name}")

    def end(self) -> None:
        """Ends the agent. Its processes continue."""
        self._is_ended = True
        ray.kill(self._actor)

    def _connect(self) -> Any:
        return self._actors.options(name=self._name, get_if_exists=True).remote(*self._started_with)

    def _log_failure(self, call: Any, what: str) -> None:
        def log_error(done: Future[None]) -> None:
            if not self._is_ended and (error := done.exception()) is not None:
                log.error("the Ray actor %s could not %s: %s", self._name, what, error)

        call.future().add_done_callback(log_error)

    def _request_changes(self, seen: Seen) -> None:
        if not self._is_ended:
            future = self._actor.changes.remote(seen).future()
            future.add_done_callback(lambda done: self._post(lambda: self._take(done)))

    def _take(self, changes: Future[tuple[Seen, list[Report]]]) -> None:
        if self._is_ended:
            return
        try:
            seen, reports = changes.result()
        except ray.exceptions.RayError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "the Ray actor %s, which keeps processes running, does not answer: %s. The "
                    "state of its processes is unknown until it answers",
                    self._name,
                    error,
                )
            if isinstance(error, ray.exceptions.ActorDiedError):
                # Ray does not restart an actor that has failed while it was created.
                self._actor = self._connect()
            self._later(lambda: self._request_changes(_NOTHING))
            return
        self._has_failed = False
        is_new = seen[0] != self._agent_id
        if is_new:  # a new process of the actor, which may know no members
            self._agent_id = seen[0]
            for member in list(self._members.values()):
                self.keep(member)
        for report in reports:
            self._report(report)
        if is_new or reports:
            self._request_changes(seen)
        else:  # another controller's call has ended this one; one of the two ends soon
            self._later(lambda: self._request_changes(seen))

    def _later(self, function: Callable[[], None]) -> None:
        timer = threading.Timer(_RETRY_S, self._post, (function,))
        timer.daemon = True
        timer.start()
