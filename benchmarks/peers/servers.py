"""Servers under test, each on the same two cores, with the same weights in the same dtype."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.vllm_processes import ENVIRONMENT, VllmServer
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.cluster import LocalCluster

KV_BYTES = 1 << 30


def close_on_sigterm() -> None:
    """`timeout` ends a benchmark so: the servers it started must not stay behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def tandem_pair(folder: Path, dtype: str, *decode_options: str) -> Iterator[LocalCluster]:
    """A prefill worker on core 0 and a decode worker on core 1."""
    with _cluster(folder, dtype) as cluster:
        with pinned_to(0):
            cluster.start_worker("prefill-0", "prefill", "--cores", "0")
        with pinned_to(1):
            cluster.start_worker("decode-0", "decode", "--cores", "1", *decode_options)
        cluster.wait_ready()
        yield cluster


@contextmanager
def tandem_aggregated(
    folder: Path, dtype: str, *options: str, threads: int = 2
) -> Iterator[LocalCluster]:
    """One worker on as many cores as threads, which prefills what it decodes."""
    with _cluster(folder, dtype) as cluster:
        cores = ",".join(str(core) for core in range(threads))
        cluster.start_worker(
            "decode-0", "decode", "--threads", str(threads), "--cores", cores, *options
        )
        cluster.wait_ready()
        yield cluster


@contextmanager
def vllm_aggregated(
    folder: Path, dtype: str, *options: str, environment: Path = ENVIRONMENT, threads: int = 2
) -> Iterator[VllmServer]:
    """One server, stopped but for its turns."""
    server = VllmServer(folder, dtype, environment)
    try:
        server.start(*options, threads=threads).pause()
        yield server
    finally:
        server.close()


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Pins the processes that are started meanwhile to this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _cluster(folder: Path, dtype: str) -> Iterator[LocalCluster]:
    """A router without workers."""
    folder.mkdir(exist_ok=True)
    with EmbeddedRedis() as redis:
        options = ("--dtype", dtype, "--kv-memory", str(KV_BYTES))
        cluster = LocalCluster(redis, folder, options=options)
        try:
            cluster.start_router()
            yield cluster
        finally:
            cluster.close()
