"""Joins and calls that are refused, and pairs that cannot use NIXL."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster, wait_for


def test_a_worker_of_another_layout_is_refused_with_each_difference(cluster: LocalCluster) -> None:
    odd = cluster.start_worker("odd", "decode", "--block-size", "32", "--num-blocks", "20")
    try:
        assert odd.process.wait(60) == 2
    finally:
        del cluster.workers["odd"]
    log = odd.log.read_text()
    assert "this worker cannot join the cluster" in log
    assert "block_size is 32, not 16" in log


def test_a_consumer_of_another_contract_is_refused(cluster: LocalCluster) -> None:
    prefill = cluster.workers["prefill-0"]
    request = pb.ConnectRequest(
        worker_id="stranger", epoch="1", compatibility=pb.KvCompatibility(block_size=8)
    )
    with pytest.raises(grpc.RpcError) as caught:
        prefill.stub().Connect(request, timeout=10, metadata=token_metadata(cluster.token))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "block_size is 16, not 8" in caught.value.details()


@pytest.mark.parametrize("metadata", [(), token_metadata("a guess")])
def test_internal_calls_need_the_token(
    cluster: LocalCluster, metadata: tuple[tuple[str, str], ...]
) -> None:
    stub = cluster.workers["prefill-0"].stub()
    for call in (
        lambda: stub.GetState(pb.GetStateRequest(), timeout=10, metadata=metadata),
        lambda: list(stub.Prefill(iter([pb.PrefillCommand()]), timeout=10, metadata=metadata)),
        lambda: list(stub.FetchBlocks(pb.FetchBlocksRequest(), timeout=10, metadata=metadata)),
        lambda: list(stub.Decode(iter([pb.DecodeCommand()]), timeout=10, metadata=metadata)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_auto_falls_back_for_the_pair_that_has_no_nixl(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    for package in ("nixl", "nixl_cu12"):
        (tmp_path / "broken" / package).mkdir(parents=True)
        text = "raise ImportError('no NIXL on this machine')\n"
        (tmp_path / "broken" / package / "__init__.py").write_text(text)
    prompts, expected = golden(5)
    with start_cluster("--transport", "auto", prefill=1) as cluster:
        without = {"PYTHONPATH": str(tmp_path / "broken")}
        cluster.start_worker("prefill-1", "prefill", environment=without)
        cluster.wait_ready()
        # One that took too long to be measured is measured again.
        wait_for(
            lambda: (
                cluster.records()["decode-0"]["transports"]
                == {"prefill-0": "nixl", "prefill-1": "grpc"}
            ),
            deadline_s=90,
            what="both transports",
        )
        log = cluster.workers["decode-0"].log.read_text()
        assert "are pulled over grpc: NIXL does not work: the producer does not offer NIXL" in log
        assert "blocks of peer prefill-0" in log
        cluster.workers.pop("prefill-0").stop()
        answers = await complete_all(cluster, prompts, max_tokens=16)
        assert [a.token_ids for a in answers] == [tokens[:16] for tokens in expected]
        assert metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport="grpc") > 0
        cluster.wait_idle()
