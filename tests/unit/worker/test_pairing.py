"""The log tells of the transport of pairs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tandem.common.perf_model.rates import WorkerRates
from tandem.worker.peers.pairing import Pairing
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tandem.worker.peers.transport_choice import TransportChoice
from tests.harness.scripted_producer import BLOCK_BYTES, CONFIG


@pytest.fixture
def pairing() -> Pairing:
    nothing: Any = None
    rates = Rates(CONFIG, WorkerRates(block_bytes=BLOCK_BYTES))
    return Pairing(CONFIG, "e", nothing, rates, nothing)


def peer(worker_id: str, epoch: str) -> Peer:
    nothing: Any = None
    return Peer(worker_id, epoch, nothing, nothing, {})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("reason", ["tcp", "unreachable", "gpu"])
async def test_what_the_network_lacks_is_a_warning_once(
    pairing: Pairing, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """It is so for every pair, and again when one of the two restarts."""
    caplog.set_level(logging.INFO)
    for worker_id, epoch in (("p0", "1"), ("p1", "1"), ("p0", "2")):
        pairing.use(
            peer(worker_id, epoch), TransportChoice("grpc", reason, "they share no network")
        )
    assert len(warnings(caplog)) == 1
    assert len(caplog.records) == 3


async def test_what_one_pair_lacks_is_a_warning_for_each(
    pairing: Pairing, caplog: pytest.LogCaptureFixture
) -> None:
    for worker_id in ("p0", "p1"):
        pairing.use(peer(worker_id, "1"), TransportChoice("grpc", "slow", "NIXL is slower"))
    assert len(warnings(caplog)) == 2
