"""The rate of a tier, as measured: where loads are slower than the engine, blocks are computed.

A load that seems slower than computing is not made, so nothing would measure it again. Each time
the estimate shrinks a little, until a load is tried.
"""

_WEIGHT = 0.3  # of the newest load
_FORGIVEN = 0.98


class LoadRate:
    def __init__(self) -> None:
        self.block_s = 0.0  # 0.0: not measured

    def observe(self, num_blocks: float, seconds: float) -> None:
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (_WEIGHT if self.block_s else 1.0)

    def decline(self) -> None:
        """A load was not made for the sake of this rate."""
        self.block_s *= _FORGIVEN
