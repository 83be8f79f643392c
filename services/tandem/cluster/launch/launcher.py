"""`tandem up` runs a whole cluster on this machine, in the foreground, and ends all of it.

    check ports -> guardian -> Redis -> Ray, and beside it: model, workers, router -> ready -> watch

Workers and router are started before Ray is up; their agents adopt them by their records. When Ray
ends, requests go on, and the agents of a fresh head adopt them; Redis is started again at its
address. However the launcher ends, nothing stays: in order it stops everything itself, after a
kill -9 the guardian does.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from tandem.cluster.launch.built_in_model import download_built_in
from tandem.cluster.launch.certificates import write_certificates
from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tandem.cluster.launch.options import LaunchOptions, make_spec
from tandem.cluster.launch.readiness import Readiness
from tandem.cluster.launch.run_logs import RunLogs
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.pools import ClusterSpec, plan
from tandem.cluster.processes import guardian, process
from tandem.cluster.processes.end_watch import EndWatch
from tandem.cluster.processes.signals import Interrupted, stop_signals
from tandem.cluster.ray.head_process import HeadProcess
from tandem.config.cluster import (
    CLUSTER_ID_VARIABLE,
    REDIS_URL_OF_KIND,
    REDIS_URL_VARIABLE,
    TOKEN_VARIABLE,
)
from tandem.config.tls import Kind
from tandem.errors import ConfigError
from tandem.memory import read_memory, why_too_much, worker_need
from tandem.models.source import BUILT_IN, ModelFolder, built_in_file, resolve
from tandem.store.client import wait_until_answers

_DRAIN_S = 2.5  # of routers and workers at the end; all must be gone in 5 s
_REDIS_STOP_S = 0.5
_GPU = Path("/dev/nvidiactl")  # is there when NVIDIA's driver is
_RETRY_S = 2.0  # of Redis, and of a Ray head that could not be started


def up(options: LaunchOptions) -> int:
    """Runs until it is told to stop. Returns the exit status; raises ConfigError if it cannot."""
    for option, (host, port) in options.ports.items():
        _check_port(host, option, port)
    _check_memory(options, None)
    screen = LaunchScreen(options)
    signals = stop_signals(parent_pid=options.parent_pid)
    with suppress(Interrupted), signals, _Launch(options, screen) as launch:
        try:
            launch.start()
            launch.watch()
        except Interrupted:
            screen.say("stopping")
    return 0


class _Launch:
    """One cluster, from its run folder to its end."""

    def __init__(self, options: LaunchOptions, screen: LaunchScreen) -> None:
        self._options = options
        self._screen = screen
        self._cluster_id = f"local-{secrets.token_hex(6)}"
        self._run_folder = Path(tempfile.mkdtemp(prefix="tandem-"))
        self._logs = RunLogs(self._run_folder, self._cluster_id)
        self._guardian = self._start_guardian()
        self._environment = self._make_environment()
        self._redis: EmbeddedRedis | None = None
        self._ray_head = HeadProcess(self._run_folder, self._environment)
        self._ray_pids: dict[str, int] = {}
        self._spec: ClusterSpec | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything in order, within 5 s."""
        self._ray_head.end()
        redis_pid = self._redis.pid if self._redis is not None and self._redis.is_running else None
        guardian.end_cluster(self._cluster_id, _DRAIN_S, spare=redis_pid)
        if self._redis is not None:
            self._redis.stop(_REDIS_STOP_S)
        shutil.rmtree(self._run_folder, ignore_errors=True)
        self._logs.close()
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._guardian.wait(1.0)

    def start(self) -> None:
        """Starts all until requests can be sent. Raises ConfigError with the reason if not."""
        began = time.monotonic()
        self._environment[REDIS_URL_VARIABLE] = self._start_redis()
        self._screen.done("redis", time.monotonic() - began)
        self._ray_head.start()
        began = time.monotonic()
        model = self._resolve_model()
        _check_memory(self._options, model)
        self._screen.done(f"model {model.name}", time.monotonic() - began)
        spec = make_spec(
            self._options,
            cluster_id=self._cluster_id,
            run_folder=self._run_folder,
            model=model.path,
        )
        if not self._options.no_cluster_tls:
            write_certificates(self._run_folder, self._cluster_id)
        members, _ = plan(spec, spec.wanted, [])
        redis_url = self._redis.url if self._redis else self._options.redis_url
        readiness = Readiness(self._options, self._cluster_id, redis_url, self._screen)
        for member in members:
            command = spec.pools[member.pool].filled(member)
            environment = process.child_environment(self._environment, member.pool)
            started = process.start(member.member_id, command, self._run_folder, environment)
            readiness.add(member, started)
        self._ray_head.tell(spec)
        self._spec = spec
        self._ray_pids = readiness.wait(self._ray_head).pids
        transports, logs = readiness.transports, str(self._logs.folder)
        self._screen.show_ready(model.name, members, transports, logs)

    def watch(self) -> None:
        """Runs until told to stop; starts Redis, Ray and the guardian again when they end."""
        ends = EndWatch()
        for name, pid in self._ray_pids.items():
            ends.add(name, pid)
        if self._redis is not None:
            ends.add("redis", self._redis.pid)
        ends.add("guardian", self._guardian.pid)
        while True:
            match ends.wait():
                case "redis":
                    assert self._redis is not None
                    self._restart_redis(self._redis)
                    ends.add("redis", self._redis.pid)
                case "guardian":
                    self._guardian = self._start_guardian()
                    ends.add("guardian", self._guardian.pid)
                case "ray head":
                    self._take_fresh_head(ends)
                case name:
                    self._screen.say(
                        f"[yellow]Ray's {name} ended: requests are served as before; a fresh head "
                        "is started, and workers are started again or added when it is up"
                    )
                    ends.forget(*self._ray_pids)
                    self._start_fresh_head(ends)

    def _start_fresh_head(self, ends: EndWatch) -> None:
        """Starts a fresh head and returns at once: Redis must not wait for Ray."""
        self._ray_head.start(self._spec)
        ends.add("ray head", self._ray_head.pid)

    def _take_fresh_head(self, ends: EndWatch) -> None:
        """Takes the fresh head, whose starting process has ended, or starts another."""
        try:
            head = self._ray_head.started()
            assert head is not None, "its output has ended"
        except ConfigError as error:
            self._screen.say(f"[red]{error.message}")
            time.sleep(_RETRY_S)
            self._start_fresh_head(ends)
            return
        self._screen.say("Ray's head is up again")
        self._ray_pids = head.pids
        for name, pid in head.pids.items():
            ends.add(name, pid)

    def _start_guardian(self) -> subprocess.Popen[bytes]:
        script = guardian.__file__
        return subprocess.Popen(
            [sys.executable, "-I", "-S", script, self._cluster_id, str(self._run_folder)],
            stdin=subprocess.PIPE,  # only we hold the other end: it is closed on exec
            env={},
            start_new_session=True,
        )

    def _make_environment(self) -> dict[str, str]:
        # Redis inherits our own environment; it must be known as the cluster's, too.
        os.environ[CLUSTER_ID_VARIABLE] = self._cluster_id
        environment = process.child_environment(os.environ)
        environment[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        # What a killed process leaves behind goes with the run folder.
        environment["TMPDIR"] = str(self._run_folder / "tmp")
        (self._run_folder / "tmp").mkdir()
        return environment

    def _start_redis(self) -> str:
        if self._options.redis_url:
            wait_until_answers(self._options.redis_url)
            return self._options.redis_url
        self._redis = EmbeddedRedis(self._run_folder / "redis", cluster_id=self._cluster_id)
        self._redis.start()
        kinds: tuple[Kind, ...] = ("router", "worker")
        for kind in kinds:
            self._environment[f"{REDIS_URL_OF_KIND}{kind}"] = self._redis.url_of(kind)
        return self._redis.url_of("controller")

    def _restart_redis(self, redis: EmbeddedRedis) -> None:
        self._screen.say("[yellow]Redis ended; starting it again at the same address")
        while True:
            try:
                redis.restart()
                return
            except ConfigError as error:
                self._screen.say(f"[red]{error.message}")
                time.sleep(_RETRY_S)

    def _resolve_model(self) -> ModelFolder:
        self._screen.say("looking for the model")
        if _needs_download(self._options.model):
            self._screen.say("downloading the built-in model (93 MB, once)")
            download_built_in()
        return resolve(self._options.model, revision=self._options.model_revision)


def _needs_download(model: str) -> bool:
    return model == BUILT_IN and not Path(model).exists() and built_in_file() is None


def _check_memory(options: LaunchOptions, model: ModelFolder | None) -> None:
    """Raises ConfigError when the workers' memory is not free. Without a model, which may have to
    be downloaded first, only the KV pools count. A GPU's memory is checked by its worker."""
    config = options.engine
    if config.device == "cuda" or (config.device == "auto" and _GPU.exists()):
        return
    num_workers, memory = options.num_prefill + options.num_decode, read_memory()
    if not why_too_much(worker_need(config, model), num_workers, memory):
        return
    is_here = options.model == BUILT_IN or Path(options.model).is_dir()
    if model is None and is_here and not _needs_download(options.model):
        # It takes no time, and the message is whole.
        model = resolve(options.model, revision=options.model_revision)
    raise ConfigError(why_too_much(worker_need(config, model), num_workers, memory))


def _check_port(host: str, option: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be had ({error.strerror}). Is another cluster up? "
                f"Choose another port with {option}"
            ) from error
