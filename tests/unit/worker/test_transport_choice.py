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
    is_offered = reach not in (Reach.NOTHING, Reach.HIDDEN_GPU)
    ways = ({"nixl": nixl} if is_offered else {}) | {"grpc": grpc}
    choice = choose_transport("auto", ways, reach)
    assert (choice.transport, choice.reason) == (transport, reason)
    assert bool(choice.warning) == bool(reason)


def test_the_warning_has_figures_and_what_would_lift_it() -> None:
    slow = choose_transport("auto", {"nixl": SLOW, "grpc": GRPC}, Reach.MEMORY).warning
    assert "NIXL is slower: 0.20 GB/s with a latency of 2.00 ms" in slow
    assert "gRPC: 1.00 GB/s with a latency of 2.00 ms" in slow
    assert "no CMA here" in choose_transport("auto", {"nixl": BROKEN, "grpc": Way()}, None).warning
    unreachable = choose_transport("auto", {"grpc": GRPC}, Reach.NOTHING).warning
    assert "no common path but plain TCP" in unreachable
    assert "hostPID and hostIPC" in unreachable
    assert "can write" in choose_transport("auto", {"nixl": FAST, "grpc": GRPC}, Reach.TCP).warning
    hidden = choose_transport("auto", {"grpc": GRPC}, Reach.HIDDEN_GPU).warning
    assert "no path to the peer's GPU" in hidden
    assert "one container that has the GPUs of both" in hidden
    assert "hostPID" not in hidden, "namespaces do not help"


def test_what_was_asked_for_is_used() -> None:
    assert choose_transport("grpc", {"grpc": GRPC}, Reach.MEMORY).transport == "grpc"
    forced = choose_transport("nixl", {"nixl": SLOW}, Reach.TCP)
    assert forced.transport == "nixl"
    assert "can write" in forced.warning


IPC = Way(PairRate("cuda_ipc", 1e-4, 1e11))
SLOW_IPC = Way(PairRate("cuda_ipc", 1e-2, 1e9))


@pytest.mark.parametrize(
    ("ways", "transport", "warning"),
    [
        ({"cuda_ipc": IPC, "grpc": GRPC}, "cuda_ipc", ""),
        ({"cuda_ipc": IPC, "nixl": FAST, "grpc": GRPC}, "cuda_ipc", ""),
        (
            {"cuda_ipc": BROKEN, "nixl": FAST, "grpc": GRPC},
            "nixl",
            "CUDA IPC does not work: no CMA",
        ),
        ({"cuda_ipc": SLOW_IPC, "nixl": FAST, "grpc": GRPC}, "nixl", "CUDA IPC is slower: 1.00 GB"),
        ({"cuda_ipc": SLOW_IPC, "grpc": GRPC}, "grpc", "nvidia-smi topo -m"),
        ({"cuda_ipc": BROKEN, "nixl": BROKEN, "grpc": GRPC}, "grpc", "CUDA IPC does not work"),
    ],
)
def test_cuda_ipc_comes_first_if_it_works_and_is_as_fast(
    ways: dict[str, Way], transport: str, warning: str
) -> None:
    choice = choose_transport("auto", ways, Reach.RDMA)
    assert choice.transport == transport
    assert warning in choice.warning
    assert bool(warning) == bool(choice.warning)


def test_a_little_slower_is_not_slower() -> None:
    assert not is_slower(PairRate("nixl", 2e-3, 0.9e9), GRPC.rate)
    assert is_slower(PairRate("nixl", 2e-3, 0.5e9), GRPC.rate)
    assert not is_slower(None, GRPC.rate)
