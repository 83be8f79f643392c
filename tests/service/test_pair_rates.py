"""The controller's user of Redis reads what workers have measured of each other."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tandem.perf_model.rates import PairRate, default_pair
from tandem.store.client import connect_blocking
from tandem.store.pair_rates import read_pair_bandwidths

pytestmark = pytest.mark.service


def test_measured_pairs_are_read_and_first_guesses_are_not(tmp_path: Path) -> None:
    pairs = {
        "prefill-0": PairRate("nixl", 1e-3, 5e9),
        "prefill-1": msgspec.structs.replace(default_pair("grpc"), reason="the other has no NIXL"),
        "prefill-2": PairRate("grpc", 1e-3, float("nan")),
    }
    record = msgspec.msgpack.encode({"worker_id": "decode-0", "pairs": pairs, "later": 1})
    with EmbeddedRedis(tmp_path, cluster_id="c") as server:
        with closing(connect_blocking(server.url_of("worker"))) as worker:
            for worker_id, value in {"decode-0": record, "broken": b"\xc1", "gone": None}.items():
                worker.sadd("{tandem:c}:workers", worker_id)
                if value is not None:
                    worker.set(f"{{tandem:c}}:worker:{worker_id}", value)
        with closing(connect_blocking(server.url_of("controller"))) as controller:
            assert read_pair_bandwidths(controller, "c") == {"decode-0": {"prefill-0": 5e9}}
