"""Manages one host's role in Ray if machines can join: head while it holds the lease, else node.

  state      meaning
  apart      this host runs no Ray
  node       this host runs a raylet that joins the head of another host
  starting   this host has the lease and starts a head
  head       this host has the lease, and its head is up

  state           event                                           next state
  apart           another host holds the lease, with an address   node of that head
  node            its raylet ends, or the head has a new number   node of the current head
  apart or node   the lease is free, and this host may lead       starting, once it has the lease
  starting        GCS, raylet and controller are up               head
  starting, head  GCS, raylet or head.py ends                     starting, with a new number
  starting, head  Redis has a higher number                       apart

The numbers are fencing numbers (head_lease.py). `tick` is called about every `RENEW_INTERVAL_S` and
looks for these events. Other hosts join a head as soon as its GCS and raylet are up, while its
controller still starts.

If a head or a node ends, its controller and agents end, too. The processes that they kept running
continue, and the next ones adopt them. While Redis is unreachable, the states stay: a head that
cannot renew its lease continues, and its controller changes nothing (controller.py).
"""

import logging
from collections.abc import Callable

import msgspec
from rich.markup import escape

from tandem.cluster.pools import ClusterSpec
from tandem.cluster.processes.end_watch import EndWatch
from tandem.cluster.processes.head_lease import HeadLease
from tandem.cluster.ray.head_process import HeadProcess
from tandem.cluster.ray.node import HeadStarted, RayNode
from tandem.common.printable import printable
from tandem.errors import ConfigError
from tandem.net.store.client import UNREACHABLE
from tandem.net.store.control_state import Head

log = logging.getLogger(__name__)


class RayHost:
    """Starts, watches and ends the host's Ray processes. `say` reports changes to the operator."""

    def __init__(
        self,
        process: HeadProcess,
        lease: HeadLease,
        node: RayNode,
        *,
        may_lead: bool,
        say: Callable[[str], None],
    ) -> None:
        self._process = process
        self._lease = lease
        self._node = node
        self._may_lead = may_lead
        self._say = say
        self._spec: ClusterSpec | None = None
        self._number = 0  # fencing number of the head that this host runs or has joined
        self._leads = False
        self._up: HeadStarted | None = None
        self._ends = EndWatch()
        self._ended = False
        self._redis_lost = False
        self._host_before = ""  # host of the latest head that this host has seen

    @property
    def is_up(self) -> bool:
        return self._up is not None

    def become_first_head(self) -> int:
        """Takes the lease of a cluster without a head. Returns the fencing number with which the
        caller starts the head. Raises the exceptions in `store.client.UNREACHABLE`."""
        number = self._lease.take()
        assert number, "the cluster is new"
        self._leads = True
        self._number = number
        return number

    def take_spec(self, spec: ClusterSpec) -> None:
        """Sets the spec of this host. Without a spec the host cannot become the head."""
        self._spec = spec

    def take_started(self, started: HeadStarted) -> None:
        """Starts to watch the Ray processes that were started."""
        self._up = started
        for name, pid in started.pids.items():
            self._ends.add(name, pid)

    def tick(self) -> None:
        """Checks for the events in the table at the top of this module, and changes the state."""
        try:
            self._tick()
        except UNREACHABLE as error:
            if not self._redis_lost:
                log.warning(
                    "Redis does not answer (%s), so this host keeps its current role in Ray", error
                )
            self._redis_lost = True
        else:
            self._redis_lost = False

    def end(self) -> None:
        self._process.end()
        self._lease.close()

    def _tick(self) -> None:
        has_ended = self._has_ended()
        if self._leads:
            if not has_ended:
                address = self._node.gcs_address if self._process.is_listening else ""
                if self._lease.renew(self._number, address):
                    return
                self._say("[yellow]another host is Ray's head now; this one becomes a node")
            self._stop()
            if not has_ended:
                return
        head = self._lease.read()
        if head is not None:
            self._host_before = head.host
        if head is None or head.host == self._node.host_id:
            self._lead()
        elif head.address and (has_ended or head.number != self._number):
            self._follow(head)

    def _has_ended(self) -> bool:
        """Says whether Ray's processes have ended or could not be started."""
        if not self._process.is_started:
            return True
        if self._up is None:
            try:
                if (started := self._process.started()) is None:
                    return False
            except ConfigError as error:
                self._say(f"[red]{escape(printable(error.message))}")
                return True
            self.take_started(started)
            self._say("Ray's head is up" if self._leads else "joined Ray's head")
        self._ended = self._ended or self._ends.wait(0.0) is not None
        return self._ended

    def _lead(self) -> None:
        if not self._may_lead or self._spec is None or not (number := self._lease.take()):
            return
        self._stop()
        self._say(f"this host becomes Ray's head (fencing number {number})")
        self._leads = True
        self._number = number
        before = "" if self._host_before == self._node.host_id else self._host_before
        spec = msgspec.structs.replace(self._spec, number=number, host_before=before)
        self._process.start(spec)

    def _follow(self, head: Head) -> None:
        self._stop()
        self._say(f"joining Ray's head at {escape(head.address)} (fencing number {head.number})")
        self._number = head.number
        self._process.join(head.address)

    def _stop(self) -> None:
        self._process.end()
        self._ends.close()
        self._ends = EndWatch()
        self._ended = False
        self._leads = False
        self._up = None
        self._number = 0
