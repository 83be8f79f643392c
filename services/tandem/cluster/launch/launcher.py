"""`tandem up` runs a complete cluster on this machine, in the foreground, and stops all of it.

1. It checks the ports, the memory and the model.
2. It starts the guardian, Redis, the workers and the routers, and waits until these are ready.
3. It starts Ray. Requests are served meanwhile, because they do not need Ray.
4. It restarts Redis, Ray and the guardian when they end.

Until Ray is up, the launcher restarts workers and routers that end. Then the pool controller
starts, finds the processes by their records and adopts them. When Ray ends, requests continue, and
the controller of a new head adopts the processes. A Redis that ended is restarted at its address.

No process outlives the launcher. In an orderly shutdown the launcher stops all processes; after a
kill -9 of the launcher, the guardian does.
"""

import errno
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
from rich.markup import escape

from tandem.cluster.gpu_check import Cards, read_cards, read_driver, why_unusable
from tandem.cluster.gpus import count_gpus, with_gpus
from tandem.cluster.launch.activity import Activity
from tandem.cluster.launch.api_key import take_api_key, with_api_key
from tandem.cluster.launch.certificates import Authority, write_certificates
from tandem.cluster.launch.checked_model import fetch_model, find_local_model, with_draft_path
from tandem.cluster.launch.files_folder import with_files
from tandem.cluster.launch.listening import Listening, read_join_token, redis_socket
from tandem.cluster.launch.options import (
    FurtherModel,
    LaunchOptions,
    check_gpu_memory,
    check_gpus,
    make_spec,
    options_for_others,
)
from tandem.cluster.launch.readiness import Readiness
from tandem.cluster.launch.run import Run
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.logs.run_logs import Addresses
from tandem.cluster.pools import ClusterSpec, Member, plan
from tandem.cluster.processes import process
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.processes.end_watch import EndWatch
from tandem.cluster.processes.head_lease import RENEW_INTERVAL_S, publish_head
from tandem.cluster.processes.owned import write_spec
from tandem.cluster.processes.process import DetachedProcess
from tandem.cluster.processes.signals import Interrupted, stop_signals
from tandem.cluster.ray.head_process import HeadProcess
from tandem.cluster.ray.ray_host import RayHost
from tandem.common.backoff import Backoff
from tandem.common.config.cluster import REDIS_URL_OF_KIND, REDIS_URL_VARIABLE, ROUTER_POOLS
from tandem.common.config.tls import Kind
from tandem.common.printable import printable
from tandem.common.process.garbage import exempt_loaded
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.engine.memory import read_memory, why_too_much, worker_need
from tandem.errors import ConfigError
from tandem.models.draft import find_draft
from tandem.models.folder import ModelFolder
from tandem.net.security.keys import KeyRecord
from tandem.net.store.client import wait_until_answers
from tandem.net.store.control_state import Head

_REDIS_STOP_S = 1.0
_GPU = Path("/dev/nvidiactl")  # exists if NVIDIA's driver is loaded
_COMMAND_MAX = 80  # largest length of a command line in a message, in characters
_RETRY_S = 2.0  # pause between attempts to start Redis, a Ray head or a worker
_TELL_S = 30.0  # time after which the screen says that Ray still starts
_LOOK_S = 0.2  # interval of checks whether Ray's starting head can receive the spec


def up(options: LaunchOptions) -> int:
    """Runs until a stop signal. Returns the exit status: 2 if the workers cannot use this machine's
    GPUs. Raises ConfigError if it cannot start for another reason."""
    num_gpus = 0 if options.engine.device == "cpu" else count_gpus(os.environ)
    driver = read_driver()
    # With --device auto, workers compute on CPUs if PyTorch cannot use the GPUs.
    cards = read_cards() if num_gpus and not why_unusable(driver) else Cards()
    try:
        check_gpus(options, num_gpus, driver, cards)
    except ConfigError as error:
        return _refused(error)
    for option, (host, port) in options.ports.items():
        _check_port(host, option, port)
    if options.listen:
        _check_port(options.listen, "--cluster-port", options.cluster_port)
        if options.join_token_file:
            read_join_token(options.join_token_file)
    screen = LaunchScreen(options)
    with suppress(Interrupted), stop_signals(parent_pid=options.parent_pid):
        began = time.monotonic()
        if (model := find_local_model(options)) is not None:
            screen.done(f"model {model.name}", time.monotonic() - began)
        try:
            check_gpu_memory(options, model, cards)
        except ConfigError as error:
            return _refused(error)
        _check_memory(options, model)
        with _Launch(options, screen, model, cards, take_api_key(options)) as launch:
            try:
                launch.start()
                launch.watch()
            except Interrupted:
                screen.say("stopping")
    return 0


class _Launch:
    """Starts, watches and stops one cluster."""

    def __init__(
        self,
        options: LaunchOptions,
        screen: LaunchScreen,
        model: ModelFolder | None,
        cards: Cards,
        api_key: KeyRecord | None,
    ) -> None:
        """Prepares a cluster. `model` is None if it may have to be downloaded. `cards` are the GPUs
        that workers may use. `api_key` is None if requests need no key."""
        self._cards = cards
        self._screen = screen
        self._model = model
        self._started_at = time.time()
        self._token = secrets.token_urlsafe(32)
        self._run = Run(f"local-{secrets.token_hex(6)}", self._token)
        if api_key is not None:
            options = with_api_key(options, api_key, self._run.folder)
        self._options = options
        self._api_key = api_key
        authority = Authority(self._run.cluster_id)
        if not options.no_cluster_tls:
            write_certificates(self._run.folder, self._run.cluster_id, authority)
        self._listening: Listening | None = None
        if options.listen:
            self._listening = Listening(options, self._run, authority, secrets.token_hex(32))
        node = self._listening.node if self._listening else None
        self._redis: EmbeddedRedis | None = None
        self._redis_front: subprocess.Popen[bytes] | None = None
        self._ray_head = HeadProcess(self._run.folder, self._run.environment, node)
        self._ray_host: RayHost | None = None
        self._ray_pids: dict[str, int] = {}
        self._spec: ClusterSpec | None = None
        # Member id -> (member, pid) of the processes that the launcher restarts. The mapping is
        # empty once Ray's head has the spec, because the pool controller then restarts them.
        self._members: dict[str, tuple[Member, int]] = {}
        self._activity: Activity | None = None
        self._backoffs: dict[str, Backoff] = {}
        # Member id -> monotonic time at which the launcher starts the member again.
        self._restarts: dict[str, float] = {}
        # Monotonic time at which the first head was started. Infinite before that, and once the
        # screen has said that Ray still starts.
        self._head_awaited_at = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops Ray's head, then the other processes, and Redis last, within 5 s in total."""
        if self._activity is not None:
            self._activity.stop()
        with Waiting(ProgressRow("processes", "are being stopped")):
            if self._listening is not None:
                self._listening.close()
            self._ray_head.end()
            redis = self._redis if self._redis is not None and self._redis.is_running else None
            self._run.end_processes(spare=redis.pid if redis else None)
            if self._redis is not None:
                self._redis.stop(_REDIS_STOP_S)
            self._run.end()

    def start(self) -> None:
        """Starts all processes and returns when the cluster takes requests. Raises ConfigError with
        the reason if it cannot."""
        with self._screen.bars():
            model, more, readiness = self._start_all()
        command_to_join = self._open_join_port() if self._listening else ""
        urls = (self._options.http_url, self._options.admin_url)
        self._run.logs.announce(Addresses(*urls, pid=os.getpid(), started_at=self._started_at))
        logs = str(self._run.logs.folder)
        name = self._options.served_model_name or model.name
        self._screen.show_ready(
            name,
            readiness.members,
            readiness.records,
            logs,
            command_to_join,
            generates=model.config.generates,
            more=[each.name for each in more],
        )
        redis_url = self._redis.url if self._redis else self._options.redis_url
        self._activity = Activity(redis_url, self._run.cluster_id, self._screen.say)
        self._activity.start()

    def _start_all(self) -> tuple[ModelFolder, list[FurtherModel], Readiness]:
        began = time.monotonic()
        self._screen.wait_for(ProgressRow("redis"))
        self._run.environment[REDIS_URL_VARIABLE] = self._start_redis()
        self._screen.done("redis", time.monotonic() - began)
        number = self._become_head() if self._listening else 0
        model = self._model or self._fetch_model(self._options)
        more = [self._further_model(each) for each in self._options.further()]
        _check_memory_of_all([(self._options, model), *((m.options, m.folder) for m in more)])
        spec = make_spec(
            with_files(with_draft_path(self._options, model), self._screen.say),
            cluster_id=self._run.cluster_id,
            run_folder=self._run.folder,
            model=model.path,
            more=more,
            host_id=self._listening.host_id if self._listening else "",
            number=number,
        )
        write_spec(self._run.folder, spec)
        members, _ = plan(spec, spec.wanted, [])
        redis_url = self._redis.url if self._redis else self._options.redis_url
        readiness = Readiness(self._options, self._run.cluster_id, redis_url, self._screen)
        # Workers take the longest until they are ready, so they are started first.
        for member in sorted(members, key=lambda each: each.pool in ROUTER_POOLS):
            started = self._start_member(spec, member)
            self._members[member.member_id] = member, started.pid
            readiness.add(member, started)
        self._spec = spec
        readiness.wait()
        return model, more, readiness

    def _start_member(self, spec: ClusterSpec, member: Member) -> DetachedProcess:
        command = spec.pools[member.pool].filled(member)
        environment = process.child_environment(self._run.environment, member.pool)
        environment = with_gpus(environment, member.gpus)
        return process.start(member.member_id, command, self._run.folder, environment)

    def _fetch_model(self, options: LaunchOptions) -> ModelFolder:
        began = time.monotonic()
        with self._screen.without_bars():  # a download shows its own progress
            model = fetch_model(options, self._screen.say)
        num_shared = self._options.workers_on_gpu(len(self._cards.total_bytes))
        check_gpu_memory(options, model, self._cards, num_shared)
        _check_memory(options, model)
        self._screen.done(f"model {model.name}", time.monotonic() - began)
        return model

    def _further_model(self, options: LaunchOptions) -> FurtherModel:
        """Finds and checks a further model. Raises ConfigError."""
        model = self._fetch_model(options)
        return FurtherModel(
            with_draft_path(options, model), model, options.served_model_name or model.name
        )

    def watch(self) -> None:
        """Runs until a stop signal. Restarts Redis, Ray and the guardian when they end."""
        ends = EndWatch()
        for member_id, (_, pid) in self._members.items():
            ends.add(member_id, pid)
        self._start_first_head(ends)
        if self._redis is not None:
            ends.add("redis", self._redis.pid)
        if self._redis_front is not None:
            ends.add("redis front", self._redis_front.pid)
        ends.add("guardian", self._run.guardian.pid)
        exempt_loaded()
        while True:
            if self._members:
                timeout_s: float | None = _LOOK_S
            else:
                timeout_s = RENEW_INTERVAL_S if self._ray_host else None
            match ends.wait(timeout_s):
                case None:
                    pass
                case member_id if member_id in self._members:
                    self._restart_later(member_id)
                case "redis":
                    assert self._redis is not None
                    self._restart_redis(self._redis)
                    ends.add("redis", self._redis.pid)
                case "redis front":
                    assert self._listening is not None
                    time.sleep(_RETRY_S)
                    self._redis_front = self._listening.start_redis_front()
                    ends.add("redis front", self._redis_front.pid)
                case "guardian":
                    self._run.restart_guardian()
                    ends.add("guardian", self._run.guardian.pid)
                case "output of the head":
                    self._adopt_new_head(ends)
                case name:
                    self._screen.say(
                        f"[yellow]Ray's {name} ended, and Ray is being restarted. Requests are "
                        "still served, but no worker is started until Ray is up"
                    )
                    self._publish_head(why=f"{name} ended")
                    ends.forget(*self._ray_pids)
                    self._start_new_head(ends)
            if self._ray_host is not None:
                self._ray_host.tick()
            if self._members:
                self._restart_due(ends)
                self._hand_over_members(ends)

    def _restart_later(self, member_id: str) -> None:
        """Starts a member again, after a delay that doubles with each end."""
        delay_s = self._backoffs.setdefault(member_id, process.restart_backoff()).next_s()
        line = process.last_warning(process.log_path(self._run.folder, member_id))
        why = f" after it had logged: {escape(printable(line))}" if line else ""
        self._screen.say(f"[yellow]{member_id} ended{why}; the next start is in {delay_s:.2g} s")
        self._restarts[member_id] = time.monotonic() + delay_s

    def _restart_due(self, ends: EndWatch) -> None:
        """Starts the members whose delay is over."""
        now = time.monotonic()
        for member_id in [m for m, at in self._restarts.items() if at <= now]:
            del self._restarts[member_id]
            if member_id in self._members:
                self._start_again(member_id, ends)

    def _start_again(self, member_id: str, ends: EndWatch) -> None:
        assert self._spec is not None
        member, _ = self._members[member_id]
        try:
            started = self._start_member(self._spec, member)
        except ConfigError as error:
            self._screen.say(f"[red]{escape(printable(error.message))}")
            return  # the pool controller starts the process once Ray is up
        self._members[member_id] = member, started.pid
        ends.add(member_id, started.pid)
        started.close()

    def _start_first_head(self, ends: EndWatch) -> None:
        """Starts Ray's head without the spec, so that no pool controller starts yet. It could start
        a process at the same time as the launcher does."""
        self._head_awaited_at = time.monotonic()
        self._ray_head.start()
        if self._ray_host is not None:
            assert self._spec is not None
            self._ray_host.take_spec(self._spec)
        else:
            self._publish_head()
            ends.add_output("output of the head", self._ray_head.output_fd)

    def _hand_over_members(self, ends: EndWatch) -> None:
        """Sends Ray's head the spec once the head is listening. From then on, the pool controller
        restarts workers and routers, and the launcher does not."""
        assert self._spec is not None
        if self._ray_host is None:
            with suppress(ConfigError):  # `_adopt_new_head` reports why the head ended
                self._ray_head.started()
        # If the first head failed, a `RayHost` has already started a second one with the spec.
        if self._ray_head.is_listening and not self._ray_head.has_spec:
            self._ray_head.send_spec(self._spec)
        if self._ray_head.has_spec:
            ends.forget(*self._members)
            self._members = {}
            self._restarts = {}  # the controller starts the processes that do not run
        elif time.monotonic() - self._head_awaited_at > _TELL_S:
            self._head_awaited_at = math.inf
            is_busy = os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0))
            why = " because this machine is busy" if is_busy else ""
            self._screen.say(f"Ray is not up after {_TELL_S:.0f} s{why}; still waiting")

    def _become_head(self) -> int:
        """Takes the lease for this host, whose Ray head will be the cluster's first. Returns the
        fencing number."""
        assert self._listening is not None
        self._ray_host = self._listening.ray_host(
            self._ray_head, may_lead=True, say=self._screen.say
        )
        return self._ray_host.become_first_head()

    def _open_join_port(self) -> str:
        assert self._listening is not None
        path = self._options.join_token_file
        token = read_join_token(path) if path else secrets.token_urlsafe(32)
        urls = self._listening.redis_urls(self._redis)
        reply = self._listening.reply(
            options_for_others(self._options), urls, self._token, self._api_key
        )
        return self._listening.open(
            reply,
            token,
            lambda address: self._screen.say(f"host {escape(printable(address))} joins"),
        )

    def _publish_head(self, *, address: str = "", why: str = "") -> None:
        """Writes the head to Redis for the routers, in a thread, because Redis may not answer."""
        cluster = (self._run.environment[REDIS_URL_VARIABLE], self._run.cluster_id)
        head = Head(0, "", address, why)
        threading.Thread(target=publish_head, args=(*cluster, head), daemon=True).start()

    def _start_new_head(self, ends: EndWatch) -> None:
        """Starts a new head and returns immediately, because a restart of Redis must not wait for
        Ray."""
        self._ray_head.start(None if self._members else self._spec)
        ends.add_output("output of the head", self._ray_head.output_fd)

    def _adopt_new_head(self, ends: EndWatch) -> None:
        """Starts to watch the new head if it is up. If it could not be started, starts another
        one."""
        try:
            if (head := self._ray_head.started()) is None:
                ends.add_output("output of the head", self._ray_head.output_fd)
                return
        except ConfigError as error:
            self._screen.say(f"[red]{escape(printable(error.message))}")
            time.sleep(_RETRY_S)
            self._start_new_head(ends)
            return
        self._screen.say("Ray's head is up again" if self._ray_pids else "Ray's head is up")
        self._publish_head(address=head.address)
        self._ray_pids = head.pids
        for name, pid in head.pids.items():
            ends.add(name, pid)

    def _start_redis(self) -> str:
        if self._options.redis_url:
            wait_until_answers(self._options.redis_url)
            return self._options.redis_url
        self._redis = EmbeddedRedis(
            self._run.folder / "redis",
            cluster_id=self._run.cluster_id,
            unix_socket=redis_socket(self._run) if self._listening else None,
        )
        self._redis.start()
        kinds: tuple[Kind, ...] = ("router", "worker")
        for kind in kinds:
            self._run.environment[f"{REDIS_URL_OF_KIND}{kind}"] = self._redis.url_of(kind)
        if self._listening is not None:
            self._redis_front = self._listening.start_redis_front()
        return self._redis.url_of("controller")

    def _restart_redis(self, redis: EmbeddedRedis) -> None:
        self._screen.say(
            "[yellow]Redis ended and is being started again at the same address. Until Redis "
            "answers, the routers serve requests with the known workers"
        )
        while True:
            try:
                redis.restart()
                return
            except ConfigError as error:
                self._screen.say(f"[red]{escape(printable(error.message))}")
                time.sleep(_RETRY_S)


def _refused(error: ConfigError) -> int:
    """Prints why no worker can use the GPUs. Returns the exit status of wrong options."""
    print(f"tandem: {printable(error.message)}", file=sys.stderr)
    return 2


def _check_memory(options: LaunchOptions, model: ModelFolder | None) -> None:
    """Raises ConfigError if the machine has too little free memory for the workers. If the model is
    not known yet, only the KV pools count. Does nothing if workers use GPUs, because they check the
    memory of their GPUs themselves."""
    config = options.engine
    if _uses_gpus(options):
        return
    num_workers = options.num_prefill + options.num_decode
    memory = read_memory()
    draft = None if model is None else find_draft(config, model)
    need = worker_need(config, model, draft=draft)
    num_drafts = options.num_decode  # prefill workers load none
    if why := why_too_much(need, num_workers, memory, options.num_encode, num_drafts=num_drafts):
        raise ConfigError(f"{why}{_largest_process()}")


def _uses_gpus(options: LaunchOptions) -> bool:
    device = options.engine.device
    return device == "cuda" or (device == "auto" and _GPU.exists())


def _check_memory_of_all(models: Sequence[tuple[LaunchOptions, ModelFolder]]) -> None:
    """Raises ConfigError if each model's workers fit into the free memory, but not all together."""
    if len(models) == 1 or any(_uses_gpus(options) for options, _ in models):
        return
    memory = read_memory()
    needed_bytes = 0
    for options, model in models:
        need = worker_need(options.engine, model, draft=find_draft(options.engine, model))
        num_workers = options.num_prefill + options.num_decode
        needed_bytes += need.bytes_of(
            num_workers, num_drafts=options.num_decode, num_encode=options.num_encode
        )
    if needed_bytes > memory.free_bytes:
        raise ConfigError(
            f"the workers of {len(models)} models need {needed_bytes / 1e9:,.1f} GB together; "
            f"{memory.place} has {memory.free_bytes / 1e9:,.1f} GB free. Lower --kv-memory, or "
            "start fewer workers"
        )


def _largest_process() -> str:
    """Names the process that uses the most memory, with a remedy; "" if it is not known."""
    used: list[tuple[int, int, str]] = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            used.append((each.memory_info().rss, each.pid, each.name()))
    if not used:
        return ""
    rss, pid, name = max(used)
    return f", or end a process: {pid} ({printable(name)}) uses the most memory, {rss / 1e9:.1f} GB"


def _check_port(host: str, option: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"port {port} ({option}) cannot be opened: {host} is not an address of this "
                    "machine. Choose an address of this machine"
                ) from error
            owner = _listener(port)
            why = f"is used by {owner}" if owner else f"cannot be used ({error.strerror})"
            todo = f"{'stop that process, or ' * bool(owner)}choose another port with {option}"
            raise ConfigError(f"port {port} of {host} {why}; {todo}") from error


def _listener(port: int) -> str:
    """Describes the process that listens on a port, as in "process 4711 (python -m http.server)".
    Returns "" if it is not known, for example because it belongs to another user."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            is_here = getattr(found.laddr, "port", 0) == port  # laddr may be an empty tuple
            if is_here and found.status == psutil.CONN_LISTEN and found.pid:
                command = printable(" ".join(psutil.Process(found.pid).cmdline()))
                return f"process {found.pid} ({command[:_COMMAND_MAX]})"
    return ""
