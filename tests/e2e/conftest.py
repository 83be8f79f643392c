"""Running clusters that e2e tests share; a test that kills a process starts one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster

StartCluster = Callable[..., AbstractContextManager[LocalCluster]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@contextmanager
def running_cluster(
    redis: EmbeddedRedis,
    folder: Path,
    *options: str,
    model: str = "smollm2",
    prefill: int = 1,
    decode: int = 1,
) -> Iterator[LocalCluster]:
    """A cluster in invariant numerics; `options` are the workers', later ones win.

    Prompts are prefilled by prefill workers, whatever this machine makes of predicted times. The
    limit of the time to the first token is one that a busy machine keeps for 16 requests at once.
    """
    cluster = LocalCluster(redis, folder, model)
    cluster.router_options = [*cluster.router_options, "--ttft-limit", "600"]
    cluster.options = [*cluster.options, "--prefill-at", "remote", *options]
    try:
        yield cluster.start(prefill=prefill, decode=decode)
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def cluster(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """One prefill and one decode worker over NIXL, for all tests that leave it whole."""
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(redis_server, folder, "--transport", "nixl") as started:
        yield started


@pytest.fixture
def start_cluster(redis_server: EmbeddedRedis, tmp_path: Path) -> StartCluster:
    """Starts a cluster of the test's own, on the shared Redis."""

    def start(*options: str, **sizes: Any) -> AbstractContextManager[LocalCluster]:
        return running_cluster(redis_server, tmp_path, *options, **sizes)

    return start
