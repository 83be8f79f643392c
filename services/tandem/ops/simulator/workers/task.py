"""A task is the part of a request on one simulated worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.ops.simulator.workers.tiers import TierRead


@dataclass(slots=True, eq=False)
class Task:
    """Part of a request on one worker."""

    owner: object
    num_tokens: int
    hashes: Sequence[bytes]  # of the prompt's full blocks
    output_tokens: int  # 0: a lease
    cached_tokens: int = 0  # that were here when it started
    queued_tokens: int = 0  # it counts as so many while it waits
    pulled_blocks: int = 0  # leading blocks that came from a holder before it was submitted
    num_held: int = 0  # leading blocks of `hashes` that it holds by name
    num_private: int = 0
    epoch: int = 0  # of the worker when it got its blocks
    tokens_left: int | None = None  # to make, when its worker died under it in the batch
    returns: bool = False  # its prompt is likely to: it is of a session
    is_weighed: bool = False  # it is the next one, and loading was not the soonest a moment ago
    load: TierRead | None = None  # from tiers, under way or done
    new_hashes: list[bytes] = field(default_factory=list)  # of blocks that are new in the pool
    loaded_blocks: dict[str, int] = field(default_factory=dict)  # by the tier's name
    first_token_by: float = math.inf  # seconds of the clock: a later first token is of no use
    has_waited: bool = False  # it did not begin when it came

    @property
    def num_there(self) -> int:
        """Number of leading blocks that need not be computed or loaded any more."""
        return max(self.num_held, self.pulled_blocks)

    @property
    def lacks_first(self) -> bool:
        """True while blocks before those that are loaded are still to be computed."""
        return self.load is not None and self.num_there < self.load.first

    def reusable_hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the blocks before the last token, which is always computed."""
        return self.hashes[: (self.num_tokens - 1) // block_size]
