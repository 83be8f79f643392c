"""Sizes the pieces of a pull that are started at once, so that others are not kept waiting.

Over CMA the copying happens inside NIXL's start, and neither another pull nor a cancel comes in
between: so a piece has what goes in `PIECE_S` at the speed seen. Where start returns at once
(RDMA, TCP) nothing is learned, and the first size stays.

A pool of SmolLM2's blocks, 188 MB scattered, took 31.1 ms in pieces of 8 MiB and 28.4 ms in one.
"""

PIECE_S = 0.005
_FIRST_BYTES = 16 << 20
_BYTES_MIN = 1 << 20
_BYTES_MAX = 64 << 20
_WEIGHT = 0.2  # of the newest measurement
_MEASURED_BYTES_MIN = 1 << 20  # smaller pieces may have been in a cache


class PieceSize:
    """Follows the speed of copies. `observe` takes pieces that were copied while they started."""

    def __init__(self) -> None:
        self._bytes_per_s = _FIRST_BYTES / PIECE_S

    @property
    def num_bytes(self) -> int:
        return max(_BYTES_MIN, min(_BYTES_MAX, int(self._bytes_per_s * PIECE_S)))

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_per_s += _WEIGHT * (num_bytes / seconds - self._bytes_per_s)
