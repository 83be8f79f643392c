"""Exact answers when the prefill worker is far away: over a late network, and over a lossy one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster
from tests.harness.network import GBIT_BYTES_PER_S, Network, Shape, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

NEAR = Shape(delay_s=0.001, bytes_per_s=GBIT_BYTES_PER_S)
BLOCK_BYTES = 16 * 30 * 3 * 64 * 2 * 4  # of SmolLM2 in float32: 720 KiB
FAR = Shape(delay_s=0.02, bytes_per_s=GBIT_BYTES_PER_S, loss=0.01)


@contextmanager
def far_cluster(
    folder: Path, shape: Shape, *options: str
) -> Iterator[tuple[LocalCluster, Network]]:
    """A prefill worker in a namespace; all else, Redis too, on this side of the network."""
    with Network(1, shape) as network, EmbeddedRedis(host=network.home.address) as redis:
        cluster = LocalCluster(redis, folder)
        cluster.options = [*cluster.options, *options]
        try:
            cluster.start_router()
            cluster.start_worker("prefill-0", "prefill", at=network.hosts[0])
            cluster.start_worker("decode-0", "decode", at=network.home)
            cluster.wait_ready()
            yield cluster, network
        finally:
            cluster.close()


# In CI tests/chaos has gRPC between hosts.
@pytest.mark.parametrize("transport", ["nixl", pytest.param("grpc", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shape", "numbers", "num_tokens"),
    [
        pytest.param(NEAR, (4, 5), 16, id="near"),
        pytest.param(NEAR, (0, 1, 2, 3, 4, 5, 6, 7), 64, id="near-all", marks=pytest.mark.slow),
        # TCP makes 0.5 MB/s of this loss, and a block has 720 KiB: the long ones take minutes.
        pytest.param(FAR, (0, 1, 2, 3, 4), 64, id="far", marks=pytest.mark.slow),
    ],
)
async def test_all_is_prefilled_far_away(
    tmp_path: Path, transport: str, shape: Shape, numbers: tuple[int, ...], num_tokens: int
) -> None:
    prompts, expected = golden(*numbers)
    options = ("--transport", transport, "--nixl-tcp", "insecure", "--prefill-at", "remote")
    options += ("--local-prefill-max-tokens", "0")
    with far_cluster(tmp_path, shape, *options) as (cluster, network):
        before = network.num_bytes_home
        answers = await complete_all(cluster, prompts, max_tokens=num_tokens)
        assert [a.token_ids for a in answers] == [tokens[:num_tokens] for tokens in expected]
        moved = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
        cached = sum(a.cached_tokens for a in answers) // 16
        assert moved >= sum(-(-len(prompt) // 16) for prompt in prompts) - cached > 0
        assert network.num_bytes_home - before > moved * BLOCK_BYTES
        cluster.wait_idle()
