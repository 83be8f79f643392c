"""A task: the work of one simulated worker for one request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.ops.simulator.workers.tiers import TierRead


@dataclass(slots=True, eq=False)
class Task:
    """The work of one simulated worker for one request: prefill, decode or both. A task without
    output tokens is called a lease: the worker prefills the prompt for another worker, which pulls
    the blocks."""

    owner: object
    num_tokens: int
    hashes: Sequence[bytes]  # hashes of the prompt's full blocks
    output_tokens: int  # number of tokens that the worker generates; 0: the task is a lease
    cached_tokens: int = 0  # number of prompt tokens in the worker's KV cache when the task started
    # number of this task's prompt tokens that are still to be computed, while the task is queued
    queued_tokens: int = 0
    # number of leading blocks that were pulled from another worker before `submit`
    pulled_blocks: int = 0
    num_held: int = 0  # number of leading blocks of `hashes` that the task uses in the KV cache
    num_private: int = 0  # number of blocks that only this task uses, which are not in the KV cache
    epoch: int = 0  # epoch of the worker (number of restarts) when the blocks were reserved
    # number of tokens left to generate when the worker died; None: the task was not decoding
    tokens_left: int | None = None
    # True: the prompt is part of a session, so a later prompt will probably extend it
    returns: bool = False
    # True: when the task was first in the queue, computing its blocks was faster than loading them
    is_compute_chosen: bool = False
    # load of the task's blocks from tiers, running or done; None: there is none
    load: TierRead | None = None
    # hashes of the blocks that the task added to the KV cache
    new_hashes: list[bytes] = field(default_factory=list)
    # tier name -> number of blocks loaded from this tier
    loaded_blocks: dict[str, int] = field(default_factory=dict)
    # simulated time after which the client no longer needs a first token, in seconds
    first_token_by: float = math.inf
    has_waited: bool = False  # True: the task did not start at once when it was submitted

    @property
    def num_available(self) -> int:
        """Number of leading blocks of the prompt that need neither be computed nor loaded from a
        tier."""
        return max(self.num_held, self.pulled_blocks)

    @property
    def needs_first_blocks(self) -> bool:
        """True if the prompt's first blocks, before those that are loaded from a tier, must still
        be computed."""
        return self.load is not None and self.num_available < self.load.first

    def reusable_hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the prompt's blocks that the task may take from the cache. The last
        token must be computed, so a block that contains it is left out."""
        return self.hashes[: (self.num_tokens - 1) // block_size]
