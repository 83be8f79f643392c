"""Fixtures that tests of several packages share: a real Redis, and a cluster's settings on it."""

from __future__ import annotations

import functools
import gc
import os
import uuid
from collections.abc import AsyncIterator, Generator, Iterator

import pytest
import torch
from httpx._transports import default
from hypothesis import settings
from redis.asyncio import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.net.store.client import connect

# What is imported and collected is a million objects and no garbage: the collector waits for the
# tests, and leaves these alone then.
gc.disable()

if not torch.cuda.is_available():
    # Triton reads it when it is imported first, which any test may bring about.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# httpx reads the system's roots for each client, which takes 20 ms of CPU time, and a harness that
# polls until a cluster is ready makes hundreds of clients. All of a test run trust the same roots.
default.create_ssl_context = functools.cache(default.create_ssl_context)

# No example is slow by itself; a busy machine must not make one look so.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")

_FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu and not torch.cuda.is_available():
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Ends all fixtures of a test that failed, where such a test gets a second try: a cluster that
    the first one left halfway would make it fail, and perhaps the tests that follow."""
    if item.stash.get(_FAILED, False) and item.config.getoption("reruns", 0):
        del item.stash[_FAILED]
        item.session._setupstate.teardown_exact(None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows why a test failed that passed when it ran again: it must not go unseen."""
    failed_once = terminalreporter.getreports("rerun")
    if failed_once:
        terminalreporter.section("FAILED ONCE, RAN AGAIN: a defect, of the test or of the program")
    for report in failed_once:
        terminalreporter.section(report.nodeid, "_")
        report.toterminal(terminalreporter._tw)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server a session. A test that kills or flushes it starts an EmbeddedRedis of its own."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def cluster_id() -> str:
    """New for each test: its keys meet nobody else's on the shared server."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def cluster_config(redis_url: str, cluster_id: str) -> ClusterConfig:
    return ClusterConfig(cluster_id=cluster_id, redis_url=redis_url, token="a-token-for-tests")


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client
