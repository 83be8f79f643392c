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
    queued_tokens: int = 0  # tokens of this task among the worker's queued tokens
    pulled_blocks: int = 0  # number of leading blocks that were pulled before the submission
    num_held: int = 0  # number of leading blocks of `hashes` that the task holds as cached blocks
    num_private: int = 0  # number of private blocks that the task holds
    epoch: int = 0  # epoch of the worker when the blocks were reserved
    # Number of tokens still to generate when the worker died; None: the task was not decoding.
    tokens_left: int | None = None
    returns: bool = False  # True: the prompt is in a session, so it is likely to be used again.
    is_compute_chosen: bool = (
        False  # True: when the task was next, computing was faster than loading.
    )
    load: TierRead | None = None  # load from tiers, in progress or done
    new_hashes: list[bytes] = field(default_factory=list)  # blocks that the task added to the pool
    loaded_blocks: dict[str, int] = field(default_factory=dict)  # loaded blocks by tier name
    first_token_by: float = math.inf  # time in s after which a first token is useless
    has_waited: bool = False  # True: the task could not start when it was submitted.

    @property
    def num_available(self) -> int:
        """Number of leading blocks that are available without computing or loading."""
        return max(self.num_held, self.pulled_blocks)

    @property
    def needs_first_blocks(self) -> bool:
        """True while blocks before the loaded range have to be computed."""
        return self.load is not None and self.num_available < self.load.first

    def reusable_hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the hashes of the blocks that can be reused. The last token is always computed,
        so a block that contains it cannot be reused."""
        return self.hashes[: (self.num_tokens - 1) // block_size]
