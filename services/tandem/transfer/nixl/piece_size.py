"""Chooses the size of a pull's pieces, so that a large pull does not delay others.

Over CMA, NIXL copies inside the call that starts a read, and no other pull or cancel is handled
meanwhile. So a piece has as many bytes as are copied in `PIECE_S` at the measured speed. Where the
call returns at once (RDMA, TCP), nothing is measured, and the first size is kept.
Measured: a pool of SmolLM2's blocks, 188 MB scattered, took 31.1 ms in pieces of 8 MiB and 28.4 ms
in one piece.
"""

PIECE_S = 0.005
_FIRST_BYTES = 16 << 20
_BYTES_MIN = 1 << 20
_BYTES_MAX = 64 << 20
_WEIGHT = 0.2  # weight of the newest measurement
_MEASURED_BYTES_MIN = 1 << 20  # smaller pieces may come from a CPU cache


class PieceSize:
    """Tracks the copy speed. `observe` takes pieces that were copied while they were started."""

    def __init__(self) -> None:
        self._bytes_per_s = _FIRST_BYTES / PIECE_S

    @property
    def num_bytes(self) -> int:
        return max(_BYTES_MIN, min(_BYTES_MAX, int(self._bytes_per_s * PIECE_S)))

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_per_s += _WEIGHT * (num_bytes / seconds - self._bytes_per_s)
