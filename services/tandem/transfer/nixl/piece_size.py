"""Chooses the size of the pieces into which a pull is split.

If the kernel copies the blocks (CMA), NIXL copies inside the call that starts a read. The transfer
thread handles no other pull or cancel meanwhile, so one large read would delay other pulls. So a
piece has as many bytes as are copied in `PIECE_S` seconds at the measured speed. For example, at
4 GB/s and 5 ms it has 20 MB. With RDMA and TCP, the call returns at once. Then nothing is measured,
and the initial size is kept.

Pieces cost little. Measured with SmolLM2: reading 188 MB in scattered blocks took 31.1 ms in pieces
of 8 MiB and 28.4 ms in one piece.
"""

PIECE_S = 0.005
_FIRST_BYTES = 16 << 20
_BYTES_MIN = 1 << 20
_BYTES_MAX = 64 << 20
_WEIGHT = 0.2  # weight of the newest measurement in the mean speed
_MEASURED_BYTES_MIN = 1 << 20  # smaller pieces are not measured: they may come from a CPU cache


class PieceSize:
    """The size of a piece, from the measured copy speed.

    `observe` must be called only for pieces that were copied inside the call that starts the read.
    """

    def __init__(self) -> None:
        self._bytes_per_s = _FIRST_BYTES / PIECE_S

    @property
    def num_bytes(self) -> int:
        return max(_BYTES_MIN, min(_BYTES_MAX, int(self._bytes_per_s * PIECE_S)))

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_per_s += _WEIGHT * (num_bytes / seconds - self._bytes_per_s)
