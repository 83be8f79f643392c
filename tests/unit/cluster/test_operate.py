"""The requests of `tandem scale`, its wait, and its message when no router answers."""

from __future__ import annotations

import socket
import threading

import pytest

from tandem.cluster.operate import (
    differences,
    memory_warnings,
    parse_sizes,
    show_status,
)
from tandem.errors import OperateError


def pool(wanted: int, running: int, ready: int, num_agents: int | None = None) -> dict[str, object]:
    agents = [{}] * (running if num_agents is None else num_agents)
    return {"wanted": wanted, "running": running, "ready": ready, "agents": agents}


def test_sizes_are_read() -> None:
    assert parse_sizes(["prefill=2", "decode=0"]) == {"prefill": 2, "decode": 0}


@pytest.mark.parametrize("argument", ["prefill", "=2", "prefill=", "prefill=-1", "prefill=two"])
def test_what_is_no_size_is_named(argument: str) -> None:
    with pytest.raises(OperateError, match="is not POOL=SIZE"):
        parse_sizes([argument])


def test_a_pool_that_is_named_twice_is_refused() -> None:
    with pytest.raises(OperateError, match="'prefill' is named twice"):
        parse_sizes(["prefill=1", "decode=1", "prefill=2"])


def test_reached_means_wanted_running_ready_and_nothing_left_to_go() -> None:
    assert differences({"prefill": pool(2, 2, 2)}, {"prefill": 2}) == []
    assert differences({"prefill": pool(1, 2, 2)}, {"prefill": 2})
    assert differences({"prefill": pool(2, 1, 2)}, {"prefill": 2})
    assert differences({"prefill": pool(2, 2, 1)}, {"prefill": 2})
    assert differences({"prefill": pool(1, 1, 1, num_agents=2)}, {"prefill": 1})
    assert differences({}, {"prefill": 1}) == ["prefill: 0 running, 0 ready, 1 wanted"]


def test_without_a_controller_workers_that_are_ready_count() -> None:
    """Kubernetes has no controller: a worker that drains is still registered, and one that starts
    is not ready yet."""

    def seen(registered: int, ready: int) -> dict[str, dict[str, object]]:
        state: dict[str, object] = {"registered": registered, "ready": ready, "serving": ready}
        return {"prefill": {"registered": 0, "ready": 0, "serving": 0}, "decode": state}

    assert differences(seen(2, 2), {"decode": 2, "prefill": 0, "router": 3}) == []
    assert differences(seen(2, 1), {"decode": 2})
    assert differences(seen(2, 1), {"decode": 1}) == ["decode: 2 registered, 1 ready, 1 wanted"]


def test_on_kubernetes_the_sizes_that_it_tells_do_not_make_it_a_controller() -> None:
    told = {"decode": {"wanted": 2, "running": 2, "registered": 2, "ready": 2, "serving": 2}}
    assert differences(told, {"decode": 2}) == []
    assert differences(told, {"decode": 3})


def test_routers_have_no_records_to_be_ready_by() -> None:
    assert differences({"router": pool(1, 1, 0)}, {"router": 1}) == []


def test_a_host_with_little_memory_is_named_once() -> None:
    def worker(host: str, free_gb: float) -> dict[str, object]:
        return {"host": host, "memory_free_bytes": free_gb * 1e9, "memory_total_bytes": 24e9}

    workers = [worker("a", 0.9), worker("a", 0.9), worker("b", 1.3), {"host": "of before"}]
    assert memory_warnings(workers) == ["memory is low on host a: 0.9 GB of 24.0 GB are free"]


def test_no_router_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OperateError, match=f"no router answers at {url}.*--url"):
            show_status(url)


@pytest.mark.parametrize("url", ["", "localhost:8002", "ftp://h", "http://[::1", "http://h:8 2"])
def test_a_url_that_cannot_be_right_is_a_clear_error(url: str) -> None:
    with pytest.raises(OperateError):
        show_status(url)


def test_another_server_is_a_clear_error() -> None:
    """A person names a gRPC port, say."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00\x00\x12\x04 not HTTP\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OperateError, match="no HTTP server answers there"):
            show_status(f"http://127.0.0.1:{server.getsockname()[1]}")
