"""Finds out whether the writes of one tier stand still, whatever other tiers do meanwhile.

The engine's thread counts the writes that begin, and the tier's own thread those that end. Each
counter has one writer, so none needs a lock.
"""


class WriteProgress:
    def __init__(self) -> None:
        self._num_begun = 0
        self._num_ended = 0
        self._at = 0.0  # a write ended, or began while no other one was under way

    def begin(self, now: float) -> None:
        """Notes that the engine hands a write to the tier's thread."""
        if self._num_begun == self._num_ended:
            self._at = now
        self._num_begun += 1

    def end(self, now: float) -> None:
        """Notes that a write ended, well or not."""
        self._at = now
        self._num_ended += 1

    def stands_still(self, now: float, limit_s: float) -> bool:
        """Returns whether writes are under way and none of them has ended for `limit_s`."""
        return self._num_begun > self._num_ended and now - self._at > limit_s
