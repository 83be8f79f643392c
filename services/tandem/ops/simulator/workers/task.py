"""The part of a request that runs on one simulated worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.ops.simulator.workers.tiers import TierRead


@dataclass(slots=True, eq=False)
class Task:
    """The part of a request that runs on one worker."""

    owner: object
    num_tokens: int
    hashes: Sequence[bytes]  # hashes of the prompt's full blocks
    output_tokens: int  # tokens to generate; 0: a lease
    cached_tokens: int = 0  # tokens in the worker's cache when the task started
    queued_tokens: int = 0  # its part of the worker's queued tokens
    pulled_blocks: int = 0  # leading blocks pulled from a prefix holder before it was submitted
    num_held: int = 0  # leading blocks of `hashes` that it holds as cached blocks
    num_private: int = 0  # private blocks that it holds
    epoch: int = 0  # epoch of the worker when the blocks were reserved
    tokens_left: int | None = None  # remaining tokens when its worker died during decoding
    returns: bool = False  # Its prompt is likely to be used again, because it is in a session.
    is_compute_chosen: bool = (
        False  # It is next in the queue, and computing was faster than loading.
    )
    load: TierRead | None = None  # load from tiers, in progress or done
    new_hashes: list[bytes] = field(default_factory=list)  # hashes of blocks it added to the pool
    loaded_blocks: dict[str, int] = field(default_factory=dict)  # loaded blocks by tier name
    first_token_by: float = math.inf  # time in s after which a first token is useless
    has_waited: bool = False  # It could not start when it was submitted.

    @property
    def num_available(self) -> int:
        """Number of leading blocks that are available without computing or loading."""
        return max(self.num_held, self.pulled_blocks)

    @property
    def needs_first_blocks(self) -> bool:
        """True while blocks before the loaded range have to be computed."""
        return self.load is not None and self.num_available < self.load.first

    def reusable_hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the blocks that can be reused: those before the last token, which
        is always computed."""
        return self.hashes[: (self.num_tokens - 1) // block_size]
