"""Progress of loading a model's weights, in bytes of its files. Pure.

Bytes are in proportion to numbers of elements: a file may store some tensors in fewer bits. A layer
that is loaded again, for a second decoder, counts once.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

Tell = Callable[[int, int], None]  # hears of bytes that are loaded, and of all bytes


def nobody(num_bytes: int, num_bytes_all: int) -> None:
    """Hears of progress and does nothing with it."""


class LoadProgress:
    """The progress of one load."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], num_bytes: int, tell: Tell = nobody
    ) -> None:
        """`shapes` are those of all tensors, by name; `num_bytes` have all files together."""
        self._shapes = shapes
        self._num_bytes = num_bytes
        self._num_elements = max(1, sum(map(prod, shapes.values())))
        self._loaded: dict[str, int] = {}
        self._tell = tell
        tell(0, num_bytes)

    def note(self, start: str) -> None:
        """Notes that all tensors whose names begin so are loaded."""
        if start in self._loaded:
            return
        named = (shape for name, shape in self._shapes.items() if name.startswith(start))
        self._loaded[start] = sum(map(prod, named))
        share = min(1.0, sum(self._loaded.values()) / self._num_elements)
        self._tell(round(share * self._num_bytes), self._num_bytes)
