"""The embedded server: a real process, private, restarted at the same address."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError
from redis.retry import Retry

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.errors import ConfigError
from tandem.net.store.client import wait_until_answers

pytestmark = pytest.mark.service
NO_RETRY = Retry(NoBackoff(), 0)


def test_answers_only_with_the_password_and_shows_it_nowhere(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with Redis.from_url(server.url) as client:
            assert client.set("a", "b")
        with (
            Redis(port=server.port, retry=NO_RETRY) as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.get("a")
        password = server.url.removeprefix("redis://:").split("@")[0]
        process = psutil.Process(server.pid)
        assert password not in " ".join(process.cmdline())
        assert password not in " ".join(process.environ().values())
        assert all(password not in f.read_text() for f in tmp_path.rglob("*"))
        listening = {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}


def test_stop_leaves_neither_process_nor_folder() -> None:
    server = EmbeddedRedis()
    server.start()
    pid = server.pid
    folder = server.log_path.parent
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    assert not server.is_running
    server.stop()


def test_restart_after_a_crash_keeps_the_address_and_loses_the_data(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url, retry=NO_RETRY) as client:
        url = server.url
        client.set("a", "b")
        server.kill()
        assert not server.is_running
        with pytest.raises(ConnectionError):
            client.get("a")
        server.restart()
        assert server.url == url
        assert client.get("a") is None
        assert not list(tmp_path.glob("*.rdb"))


def test_restart_of_a_running_server_leaves_one(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        old_pid = server.pid
        server.restart()
        assert not psutil.pid_exists(old_pid)
        wait_until_answers(server.url)


def test_a_taken_port_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        server.kill()
        with socket.create_server(("127.0.0.1", server.port)):
            with pytest.raises(ConfigError, match="in use"):
                server.start(deadline_s=3.0)
            assert not server.is_running


def test_waiting_for_nobody_ends_with_an_error_without_the_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} does not answer") as caught:
            wait_until_answers(f"redis://:hush@127.0.0.1:{port}/0", deadline_s=0.05)
    assert "hush" not in str(caught.value)


def test_a_wrong_password_is_named_at_once(redis_url: str) -> None:
    address = redis_url.split("@")[1]
    with pytest.raises(ConfigError, match="refuses the password"):
        wait_until_answers(f"redis://:wrong@{address}", deadline_s=5.0)


def test_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, tandem.cluster.processes.embedded_redis; "
        "assert not {'ray', 'torch', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
