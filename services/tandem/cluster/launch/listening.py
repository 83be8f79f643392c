"""The ports of a host that other hosts connect to: its Ray node, and the join server.

The machine of `tandem up --listen` and those of `tandem join` are equal: other machines can join
through each of them, and with an external Redis each can become Ray's head
(cluster/ray/ray_host.py).
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.cluster.gpus import count_gpus
from tandem.cluster.joining.protocol import TOKEN_BYTES_MIN, JoinReply
from tandem.cluster.joining.server import JoinServer
from tandem.cluster.launch.certificates import Authority, host_folder, write_host_certificates
from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.pool_option import as_mapping
from tandem.cluster.launch.run import Run
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.processes.head_lease import HeadLease
from tandem.cluster.processes.process import child_environment
from tandem.cluster.ray.head_process import HeadProcess
from tandem.cluster.ray.node import RayNode, write_ray_token
from tandem.cluster.ray.ray_host import RayHost
from tandem.common.config.cluster import REDIS_URL_VARIABLE
from tandem.common.config.tls import KINDS, Kind
from tandem.common.process.numa import by_node
from tandem.errors import ConfigError
from tandem.net.security.keys import KeyRecord

_REDIS_PORT = 8  # offset of Redis's port from the first port of the cluster
_SOCKET = "redis.socket"


class Listening:
    """Opens one host's ports for other hosts. The run folder must exist."""

    def __init__(
        self, options: LaunchOptions, run: Run, authority: Authority, ray_token: str
    ) -> None:
        self.host_id = f"host-{secrets.token_hex(4)}"
        self._options = options
        self._run = run
        self._authority = authority
        self._ray_token = ray_token
        self._server: JoinServer | None = None
        write_host_certificates(run.folder, authority, options.listen)
        write_ray_token(run.folder, ray_token)
        nodes = by_node(os.sched_getaffinity(0))
        self.node = RayNode(
            address=options.listen,
            host_id=self.host_id,
            cores=[core for node in nodes for core in node],
            numa=[len(node) for node in nodes],
            num_gpus=count_gpus(os.environ),
            labels=as_mapping(options.labels),
            first_port=options.cluster_port,
            tls_dir=str(host_folder(run.folder, "ray")),
        )

    def lease(self) -> HeadLease:
        url = self._run.environment[REDIS_URL_VARIABLE]
        return HeadLease(url, self._run.cluster_id, self.host_id)

    def ray_host(
        self, process: HeadProcess, *, may_lead: bool, say: Callable[[str], None]
    ) -> RayHost:
        return RayHost(process, self.lease(), self.node, may_lead=may_lead, say=say)

    def open(self, reply: JoinReply, token: str, joined: Callable[[str], None]) -> str:
        """Starts the join server. Returns the command to run on another machine."""
        token_file = self._run.folder / "join.token"
        token_file.touch(mode=0o600)
        token_file.write_text(token + "\n")
        self._server = JoinServer(
            self._options.listen,
            self._options.cluster_port,
            folder=host_folder(self._run.folder, "join"),
            token=token,
            reply=reply,
            joined=joined,
        )
        host = f"[{self._options.listen}]" if ":" in self._options.listen else self._options.listen
        return (
            f"tandem join {host}:{self._options.cluster_port} "
            f"--token-file {token_file} --ca-sha256 {self._authority.sha256}"
        )

    def reply(
        self,
        options: list[str],
        redis_urls: dict[str, str],
        cluster_token: str,
        api_key: KeyRecord | None,
    ) -> JoinReply:
        return JoinReply(
            cluster_id=self._run.cluster_id,
            options=options,
            cluster_token=cluster_token,
            ray_token=self._ray_token,
            redis_urls=redis_urls,
            authority=self._authority.pem.decode(),
            authority_key=self._authority.key_pem.decode(),
            may_lead=bool(self._options.redis_url),
            first_address=self._options.listen,
            api_key=api_key,
        )

    def redis_urls(self, redis: EmbeddedRedis | None) -> dict[str, str]:
        """Returns kind of process -> Redis URL for processes of this kind on other hosts."""
        if redis is None:
            return dict.fromkeys(KINDS, self._options.redis_url)
        host = f"[{self._options.listen}]" if ":" in self._options.listen else self._options.listen
        port = self._options.cluster_port + _REDIS_PORT
        return {
            kind: f"rediss://{redis.user_of(kind)}@{host}:{port}/0?{_tls_query(kind)}"
            for kind in KINDS
        }

    def start_redis_front(self) -> subprocess.Popen[bytes]:
        """Starts the TLS proxy through which other hosts reach the Redis of this machine."""
        command = [sys.executable, "-m", "tandem.net.security.redis_front"]
        command += ["--cluster-id", self._run.cluster_id, "--socket", str(redis_socket(self._run))]
        command += ["--tls-dir", str(host_folder(self._run.folder, "redis"))]
        command += ["--host", self._options.listen]
        command += ["--port", str(self._options.cluster_port + _REDIS_PORT)]
        with (self._run.logs.folder / "redis-front.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=child_environment(self._run.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def redis_socket(run: Run) -> Path:
    return run.tmp / _SOCKET


def read_join_token(path: str) -> str:
    """Reads the join secret from a file. Raises ConfigError if it cannot be read or is too
    short."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from None
    if len(token) < TOKEN_BYTES_MIN or not token.isascii():
        raise ConfigError(
            f"the token in {path} must have at least {TOKEN_BYTES_MIN} ASCII characters on one line"
        )
    return token


def for_this_host(url: str, run: Run) -> str:
    """Replaces `{tls}` in a Redis URL of `JoinReply` by this machine's tls folder."""
    return url.replace("{tls}", str(run.folder / "tls"))


def _tls_query(kind: Kind) -> str:
    folder = "router" if kind == "router" else "worker"
    names = {"ssl_ca_certs": "ca.crt", "ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
    return "&".join(f"{key}={{tls}}/{folder}/{name}" for key, name in names.items())
