"""Fixtures shared by tests of several packages: a real Redis, and a cluster's settings on it."""

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

# Imports and collection create a million live objects and no garbage, so the garbage collector is
# enabled only for the tests, and ignores these objects.
gc.disable()

if not torch.cuda.is_available():
    # Triton reads this variable when it is first imported, which any test may cause.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# httpx loads the system's roots for each client, which takes 20 ms of CPU time, and a harness that
# polls a starting cluster creates hundreds of clients. All of them trust the same roots.
default.create_ssl_context = functools.cache(default.create_ssl_context)

# Examples are fast; a busy machine must not fail them for being slow.
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
    """Tears down all fixtures of a failed test that will be retried: a cluster in a broken state
    would fail the retry, and perhaps later tests."""
    if item.stash.get(_FAILED, False) and item.config.getoption("reruns", 0):
        del item.stash[_FAILED]
        item.session._setupstate.teardown_exact(None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows why a test failed that passed when it was retried, so that it is noticed."""
    failed_once = terminalreporter.getreports("rerun")
    if failed_once:
        terminalreporter.section("FAILED ONCE, RAN AGAIN: a defect, of the test or of the program")
    for report in failed_once:
        terminalreporter.section(report.nodeid, "_")
        report.toterminal(terminalreporter._tw)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server for each session. A test that kills or flushes it starts its own EmbeddedRedis."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def cluster_id() -> str:
    """A new id for each test, so that tests do not share keys on the server."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def cluster_config(redis_url: str, cluster_id: str) -> ClusterConfig:
    return ClusterConfig(cluster_id=cluster_id, redis_url=redis_url, token="a-token-for-tests")


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client
