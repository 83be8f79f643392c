from __future__ import annotations

import pytest

from tandem.transfer.reads.piece_size import (
    CUDA_IPC_BYTES,
    PIECE_S,
    READS_MAX,
    PieceSize,
    device_bytes,
)

MIB = 1 << 20


def test_a_piece_becomes_what_the_speed_seen_moves_in_the_time_allowed() -> None:
    size = PieceSize()
    assert size.num_bytes == 16 * MIB
    for _ in range(60):
        size.observe(size.num_bytes, size.num_bytes / 6e9)
    assert size.num_bytes == pytest.approx(6e9 * PIECE_S, rel=0.01)


def test_one_slow_piece_does_not_decide() -> None:
    size = PieceSize()
    size.observe(16 * MIB, 10.0)
    assert size.num_bytes > 12 * MIB


@pytest.mark.parametrize(("bytes_per_s", "bound"), [(1e6, MIB), (1e15, 64 * MIB)])
def test_a_piece_has_bounds_whatever_the_speed(bytes_per_s: float, bound: int) -> None:
    size = PieceSize()
    for _ in range(200):
        size.observe(16 * MIB, 16 * MIB / bytes_per_s)
    assert size.num_bytes == bound


def test_a_piece_that_may_have_been_in_a_cache_teaches_nothing() -> None:
    size = PieceSize()
    size.observe(MIB // 2, 1e-6)
    size.observe(16 * MIB, 0.0)  # a clock that stood still
    assert size.num_bytes == 16 * MIB


def test_pieces_between_gpus_are_larger_unless_one_pull_would_fill_the_quarantine() -> None:
    assert device_bytes(block_bytes=2 * MIB, quarantine_blocks_max=256) == 64 * MIB
    assert PieceSize(64 * MIB).num_bytes == 64 * MIB
    small = device_bytes(block_bytes=MIB // 4, quarantine_blocks_max=256)
    assert small == 16 * MIB
    assert READS_MAX * small // (MIB // 4) <= 256 // 2
    assert device_bytes(block_bytes=1024, quarantine_blocks_max=256) == MIB


def test_a_piece_over_cuda_ipc_keeps_its_size() -> None:
    assert PieceSize(CUDA_IPC_BYTES).num_bytes == CUDA_IPC_BYTES == 1024 * MIB
