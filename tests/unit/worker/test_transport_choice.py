from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import PairRate
from tandem.transfer.nixl.reach import Reach
from tandem.worker.peers.transport_choice import Way, choose_transport, is_slower

FAST = Way(PairRate("nixl", 2e-4, 4e9))
SLOW = Way(PairRate("nixl", 2e-3, 2e8))
GRPC = Way(PairRate("grpc", 2e-3, 1e9))
BROKEN = Way(error="no CMA here")


@pytest.mark.parametrize(
    ("nixl", "grpc", "reach", "transport", "reason"),
    [
        (FAST, GRPC, Reach.MEMORY, "nixl", ""),
        (FAST, GRPC, Reach.RDMA, "nixl", ""),
        (FAST, GRPC, None, "nixl", ""),
        (FAST, GRPC, Reach.TCP, "nixl", "tcp"),
        (SLOW, GRPC, Reach.TCP, "grpc", "slow"),
        (BROKEN, GRPC, Reach.NOTHING, "grpc", "unreachable"),
        (BROKEN, GRPC, Reach.HIDDEN_GPU, "grpc", "gpu"),
        (SLOW, GRPC, Reach.MEMORY, "grpc", "slow"),
        (SLOW, Way(), Reach.MEMORY, "nixl", ""),  # nothing to compare with
        (Way(), GRPC, Reach.MEMORY, "nixl", ""),
        (BROKEN, GRPC, Reach.MEMORY, "grpc", "broken"),
        (BROKEN, Way(), None, "grpc", "broken"),
    ],
)
def test_auto(nixl: Way, grpc: Way, reach: Reach | None, transport: str, reason: str) -> None:
    choice = choose_transport("auto", nixl, grpc, reach)
    assert (choice.transport, choice.reason) == (transport, reason)
    assert bool(choice.warning) == bool(reason)


def test_the_warning_has_figures_and_what_would_lift_it() -> None:
    slow = choose_transport("auto", SLOW, GRPC, Reach.MEMORY).warning
    assert "NIXL is slower: 0.20 GB/s with a latency of 2.00 ms" in slow
    assert "gRPC: 1.00 GB/s with a latency of 2.00 ms" in slow
    assert "no CMA here" in choose_transport("auto", BROKEN, Way(), None).warning
    unreachable = choose_transport("auto", BROKEN, GRPC, Reach.NOTHING).warning
    assert "no common path but plain TCP" in unreachable
    assert "hostPID and hostIPC" in unreachable
    assert "can write" in choose_transport("auto", FAST, GRPC, Reach.TCP).warning
    hidden = choose_transport("auto", BROKEN, GRPC, Reach.HIDDEN_GPU).warning
    assert "no path to the peer's GPU" in hidden
    assert "one container that has the GPUs of both" in hidden
    assert "hostPID" not in hidden, "namespaces do not help"


def test_what_was_asked_for_is_used() -> None:
    assert choose_transport("grpc", FAST, GRPC, Reach.MEMORY).transport == "grpc"
    forced = choose_transport("nixl", SLOW, GRPC, Reach.TCP)
    assert forced.transport == "nixl"
    assert "can write" in forced.warning


def test_a_little_slower_is_not_slower() -> None:
    assert not is_slower(PairRate("nixl", 2e-3, 0.9e9), GRPC.rate)
    assert is_slower(PairRate("nixl", 2e-3, 0.5e9), GRPC.rate)
    assert not is_slower(None, GRPC.rate)
