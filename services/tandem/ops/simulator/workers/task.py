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
    # Number of prompt tokens that must be computed. It is set only while the task is queued.
    queued_tokens: int = 0
    # Number of blocks at the start of the prompt that were pulled from another worker before
    # `submit`.
    pulled_blocks: int = 0
    # Number of the task's blocks that are in the KV cache. They are the first ones of `hashes`.
    num_held: int = 0
    is_reserved: bool = False  # True: a decode worker has reserved memory and waits for the KV
    num_private: int = 0  # number of the task's blocks not in the cache; no other task uses them
    epoch: int = 0  # number of restarts of the worker when the task's blocks were reserved
    # Number of tokens that were left to generate when the worker died. None: the task was not
    # decoding then.
    tokens_left: int | None = None
    # True: the prompt is part of a session, so a later prompt will probably extend it.
    returns: bool = False
    # True: when the worker last tried to start the task, computing the blocks was faster than
    # loading them from tiers.
    is_compute_chosen: bool = False
    # The load of the task's blocks from tiers, running or done. None: no block is loaded.
    load: TierRead | None = None
    # Hashes of the blocks that the task added to the KV cache.
    new_hashes: list[bytes] = field(default_factory=list)
    # Tier name -> number of the task's blocks that were loaded from this tier.
    loaded_blocks: dict[str, int] = field(default_factory=dict)
    # Deadline for the first token, in seconds of simulated time.
    first_token_by: float = math.inf
    has_waited: bool = False  # True: the task could not start at once when it was submitted.

    @property
    def num_available(self) -> int:
        """Number of blocks at the start of the prompt that are in the KV cache or were pulled. They
        need not be computed or loaded."""
        return max(self.num_held, self.pulled_blocks)

    @property
    def needs_first_blocks(self) -> bool:
        """True if blocks are loaded from a tier, and missing blocks before them must still be
        computed."""
        return self.load is not None and self.num_available < self.load.first

    def reusable_hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the prompt's blocks that the task may take from the cache. The last
        token must be computed, so a block that contains it is left out."""
        return self.hashes[: (self.num_tokens - 1) // block_size]
