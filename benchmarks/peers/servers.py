"""Servers under test, each on the same two cores, with the same weights in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.peers.vllm_processes import ENVIRONMENT, VllmServer
from benchmarks.shared.cluster import Cluster, up

KV_BYTES = 1 << 30


def tandem_pair(dtype: str, *options: str) -> AbstractContextManager[Cluster]:
    """A prefill worker and a decode worker, which `tandem up` gives a core each."""
    sizes = ("--prefill", "1", "--decode", "1")
    return up(*sizes, "--dtype", dtype, "--kv-memory", str(KV_BYTES), *options)


def tandem_mixed(dtype: str, *options: str) -> AbstractContextManager[Cluster]:
    """Two workers with a thread and a core each, which prefill what they decode."""
    sizes = ("--prefill", "0", "--decode", "2", "--threads", "1")
    return up(*sizes, "--dtype", dtype, "--kv-memory", str(KV_BYTES), *options)


@contextmanager
def tandem_aggregated(dtype: str, *options: str, threads: int = 2) -> Iterator[Cluster]:
    """One worker on as many cores as threads, which prefills what it decodes."""
    sizes = ("--prefill", "0", "--decode", "1", "--threads", str(threads))
    with up(*sizes, "--dtype", dtype, "--kv-memory", str(KV_BYTES), *options) as cluster:
        cluster.pin("decode-0", range(threads))
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
