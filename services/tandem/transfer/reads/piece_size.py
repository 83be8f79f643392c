"""Chooses the size of the pieces into which a pull is split. Each piece is one read.

With the transport CMA, all bytes are copied inside the call that starts a read. During this call,
the transfer thread cannot handle other pulls or cancels, so a large read would delay them. So a
piece has as many bytes as are copied in `PIECE_S` seconds at the measured speed: at 4 GB/s, a piece
has 20 MB. With RDMA, TCP and CUDA IPC, the call returns at once, nothing is measured, and pieces
keep the initial size. Between GPUs of one machine, the initial size is larger (`device_bytes`,
`CUDA_IPC_BYTES`), because a GPU may copy 16 MiB in less time than the thread waits between two
polls.

Pieces cost little. Measured with SmolLM2: reading 188 MB in scattered blocks took 31.1 ms in pieces
of 8 MiB and 28.4 ms in one piece.
"""

PIECE_S = 0.005
# Largest number of unfinished reads of a pull. With 2, one read is under way while the next one is
# started.
READS_MAX = 2
FIRST_BYTES = 16 << 20
# Size of a piece over CUDA IPC. A worker seldom has as many bytes of pulls under way, so most pulls
# are one piece, which the host queues once. At 25 GB/s between two GPUs, it takes 43 ms. A copy
# always ends, even if its peer was killed, so its blocks are not fenced for longer.
CUDA_IPC_BYTES = 1 << 30
_BYTES_MIN = 1 << 20
_BYTES_MAX = 64 << 20
_WEIGHT = 0.2  # weight of the newest measurement in the moving average of the copy speed
# With CUDA IPC by NIXL, a pull that is given up leaves up to two reads unfinished. Their blocks are
# at most this share of the blocks that may be fenced, so that one pull does not make others be
# refused.
_FENCED_SHARE = 0.5
# Smaller pieces are not measured, because they may be copied from a CPU cache.
_MEASURED_BYTES_MIN = 1 << 20


def device_bytes(*, block_bytes: int, quarantine_blocks_max: int) -> int:
    """Returns the initial size of a piece over NIXL between the memories of GPUs on one machine.

    `block_bytes` is the mean size of a block. The speed with this size was not measured.
    """
    fenced_max = int(_FENCED_SHARE * quarantine_blocks_max) * block_bytes
    return max(_BYTES_MIN, min(_BYTES_MAX, fenced_max // READS_MAX))


class PieceSize:
    """Computes the size of a piece from the measured copy speed.

    `observe` must be called only for pieces that were copied inside the call that starts the read.
    """

    def __init__(self, first_bytes: int = FIRST_BYTES) -> None:
        self._bytes_per_s = first_bytes / PIECE_S
        self._bytes_max = max(_BYTES_MAX, first_bytes)

    @property
    def num_bytes(self) -> int:
        return max(_BYTES_MIN, min(self._bytes_max, int(self._bytes_per_s * PIECE_S)))

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _MEASURED_BYTES_MIN and seconds > 0:
            self._bytes_per_s += _WEIGHT * (num_bytes / seconds - self._bytes_per_s)
