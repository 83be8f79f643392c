"""Memory for the results of the C++ decoder's steps."""

from __future__ import annotations

from array import array

import torch

from tandem.engine.cache.pool_memory import own_pages


class Results:
    """Memory for a step's results, reused: the system would find and zero megabytes each step."""

    def __init__(self, num_rows: int, vocab: int, room: torch.Tensor | None = None) -> None:
        """`room` of one before, used again if it is large enough."""
        if room is None or len(room) < num_rows * vocab:
            room = torch.frombuffer(own_pages(max(1, num_rows) * vocab * 4), dtype=torch.float32)
        self._room = room
        self._vocab = vocab
        self.logits = room[: num_rows * vocab].view(num_rows, vocab)
        self.logits_address = self.logits.data_ptr()
        self.most_likely = array("i", bytes(4 * num_rows))

    def of(self, num_rows: int) -> Results:
        """Returns results of `num_rows` rows in the same memory."""
        if num_rows == len(self.most_likely):
            return self
        return Results(num_rows, self._vocab, self._room)
