"""`tandem join` makes this machine a host of a cluster, in the foreground, until it is stopped.

1. It sends a join request to a host of the cluster.
2. It creates the run folder and the certificates, and starts the guardian.
3. It downloads and checks the model.
4. It starts Ray, which joins the head, and the join server for further machines.
5. It restarts Ray and the guardian when they end.

The pool controller places routers and workers on this host as on the first machine. They continue
while Ray has no head. With an external Redis, this host may become the head.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Self

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from tandem.cluster.joining.call import request_join
from tandem.cluster.joining.protocol import JoinReply
from tandem.cluster.launch.api_key import with_api_key
from tandem.cluster.launch.certificates import Authority, write_certificates
from tandem.cluster.launch.checked_model import fetch_model
from tandem.cluster.launch.leave import Leaving
from tandem.cluster.launch.listening import Listening, for_this_host, read_join_token
from tandem.cluster.launch.options import LaunchOptions, check_listen, make_spec, on_host
from tandem.cluster.launch.pool_option import Labels
from tandem.cluster.launch.run import Run
from tandem.cluster.processes import guardian
from tandem.cluster.processes.end_watch import EndWatch
from tandem.cluster.processes.head_lease import RENEW_INTERVAL_S
from tandem.cluster.processes.owned import write_spec
from tandem.cluster.processes.signals import Interrupted, stop_signals
from tandem.cluster.ray.head_process import HeadProcess
from tandem.common.config.cluster import REDIS_URL_OF_KIND, REDIS_URL_VARIABLE
from tandem.common.options import Bounds, Options, PositiveOrNone, Text, read
from tandem.common.printable import printable
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import ConfigError

_START_DEADLINE_S = 180.0
_START_INTERVAL_S = 0.2
_DEFAULT_PORT = 8100


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions(Options):
    """`tandem join` makes this machine a host of a cluster. Ctrl-C moves its routers and workers to
    other hosts before it leaves. A second Ctrl-C ends them at once."""

    address: Text
    """Address of a host of the cluster, or ADDRESS:PORT. It can also be the first argument, without
    the option."""
    token_file: Text
    """File with the cluster's token for joining machines."""
    ca_sha256: Annotated[Text, Bounds(pattern="[0-9A-Fa-f:]*")]
    """SHA-256 fingerprint of the cluster's certificate authority, which `tandem up` prints."""
    own_address: Annotated[Text, Parameter(metavar="IP")] = ""
    """IP address at which other machines reach this one. Default: the local address from which this
    machine connects to ADDRESS."""
    model: Text = ""
    """Path or name of the cluster's model on this machine. Default: the same as on the first
    machine."""
    labels: Labels = ()
    """Labels of this machine, such as gpu=H100. `tandem up --prefill 2:gpu=H100` starts prefill
    workers only on machines with this label."""
    parent_pid: Annotated[PositiveOrNone, Parameter(name="--die-with-parent", metavar="PID")] = None
    """Stop this host's routers and workers when the process with this id ends. 0: off."""

    def check_together(self) -> None:
        check_listen(self.own_address, "--own-address")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port in `address`; the port is _DEFAULT_PORT if there is none. Raises
        ConfigError."""
        text = self.address
        if text.count(":") > 1 and not text.startswith("["):
            return text, _DEFAULT_PORT
        host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not colon:
            return text.strip("[]"), _DEFAULT_PORT
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"address is {text[:80]!r}; it must be ADDRESS or ADDRESS:PORT, with a port from 1 "
                "to 65535"
            )
        return host.strip("[]"), int(port)


def join(options: JoinOptions) -> int:
    """Runs until a stop signal. Returns the exit status. Raises ConfigError if it cannot start."""
    token = read_join_token(options.token_file)
    host, port = options.host_and_port
    with Waiting(ProgressRow(options.address, "is asked to let this host join")):
        reply, address = request_join(
            host, port, token=token, ca_sha256=options.ca_sha256, own_address=options.own_address
        )
    if guardian.cluster_processes(reply.cluster_id):
        raise ConfigError(f"this machine is already a host of the cluster at {options.address}")
    signals = stop_signals(parent_pid=options.parent_pid)
    with suppress(Interrupted), signals, _JoinedHost(options, reply, address, token) as joined:
        try:
            joined.start()
            joined.watch()
        except Interrupted:
            if joined.is_joined and options.parent_pid is None:
                joined.say(
                    "this host leaves the cluster: its routers and workers move to other hosts. "
                    "Press Ctrl-C again to end the routers and workers at once"
                )
                with suppress(Interrupted), stop_signals():
                    joined.leave()
            joined.say("stopping")
    return 0


class _JoinedHost:
    """Makes this machine a host: starts everything that a host needs, watches it and cleans up."""

    def __init__(self, options: JoinOptions, reply: JoinReply, address: str, token: str) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._waiting: Waiting | None = None
        self._reply = reply
        self._token = token
        sent = read(LaunchOptions, "tandem join", reply.options)
        if options.model:
            sent = replace(sent, model=options.model)
        self._options = on_host(
            sent, first=reply.first_address, address=address, labels=options.labels
        )
        self._run = Run(reply.cluster_id, reply.cluster_token)
        if reply.api_key is not None:
            self._options = with_api_key(self._options, reply.api_key, self._run.folder)
        authority = Authority.with_key(
            reply.cluster_id, reply.authority.encode(), reply.authority_key.encode()
        )
        write_certificates(self._run.folder, reply.cluster_id, authority)
        self._run.environment.update(_redis_variables(reply.redis_urls, self._run))
        self._listening = Listening(self._options, self._run, authority, reply.ray_token)
        self._ray = self._listening.ray_host(
            HeadProcess(self._run.folder, self._run.environment, self._listening.node),
            may_lead=reply.may_lead,
            say=self.say,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with Waiting(ProgressRow("processes", "are being stopped")):
            self._listening.close()
            self._ray.end()
            self._run.end_processes()
            self._run.end()

    def say(self, text: str) -> None:
        with self._waiting.hidden() if self._waiting is not None else nullcontext():
            self._console.print(f"[dim]{time.monotonic() - self._began:5.1f} s[/]  {text}")

    def start(self) -> None:
        """Starts Ray and returns once it has joined the head. Raises ConfigError if this host
        cannot join."""
        model = fetch_model(self._options, self.say)
        spec = make_spec(
            self._options,
            cluster_id=self._run.cluster_id,
            run_folder=self._run.folder,
            model=model.path,
            host_id=self._listening.host_id,
        )
        write_spec(self._run.folder, spec)
        self._ray.take_spec(spec)
        give_up_at = time.monotonic() + _START_DEADLINE_S
        with self._bars(ProgressRow("ray", "this host joins Ray's head")):
            while not self._ray.is_up:
                self._ray.tick()
                if time.monotonic() > give_up_at:
                    raise ConfigError(
                        f"this host did not join Ray's head in {_START_DEADLINE_S:g} s; the "
                        f"logs in {self._run.logs.folder} show why"
                    )
                time.sleep(_START_INTERVAL_S)
        self._listening.open(
            self._reply, self._token, lambda who: self.say(f"host {escape(printable(who))} joins")
        )
        self.say(
            f"[bold green]joined[/] as {self._listening.host_id} ({escape(self._options.listen)})"
        )
        self.say(f"the logs are in {escape(str(self._run.logs.folder))}")

    @property
    def is_joined(self) -> bool:
        return self._ray.is_up

    def leave(self) -> None:
        """Moves the routers and workers of this host to other hosts."""
        leaving = Leaving(
            controller_url=self._run.environment[REDIS_URL_VARIABLE],
            worker_url=self._run.environment[f"{REDIS_URL_OF_KIND}worker"],
            cluster_id=self._run.cluster_id,
            host_id=self._listening.host_id,
        )
        with self._bars() as waiting:
            leaving.run(self.say, self._ray.tick, waiting.show)

    @contextmanager
    def _bars(self, *steps: ProgressRow) -> Iterator[Waiting]:
        """Shows progress rows on a terminal during the `with` statement. `say` prints above the
        rows."""
        with Waiting(*steps) as waiting:
            self._waiting = waiting
            try:
                yield waiting
            finally:
                self._waiting = None

    def watch(self) -> None:
        """Runs until a stop signal. Restarts Ray and the guardian when they end."""
        ends = EndWatch()
        ends.add("guardian", self._run.guardian.pid)
        while True:
            if ends.wait(RENEW_INTERVAL_S):
                self._run.restart_guardian()
                ends.add("guardian", self._run.guardian.pid)
            self._ray.tick()


def _redis_variables(urls: Mapping[str, str], run: Run) -> dict[str, str]:
    """Builds the environment variables with the URLs of Redis for the processes of this host."""
    found = {kind: for_this_host(url, run) for kind, url in urls.items()}
    of_kinds = {f"{REDIS_URL_OF_KIND}{kind}": found[kind] for kind in ("router", "worker")}
    return {**of_kinds, REDIS_URL_VARIABLE: found["controller"]}
