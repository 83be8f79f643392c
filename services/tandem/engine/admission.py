"""The start of a sequence: what it reuses, and the token that it goes on with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """The start of a sequence with what is cached of it."""

    num_cached_blocks: int
    num_computed_tokens: int
    resume: int  # it goes on with the token after so many others, once it awaits no KV any more
    sources: tuple[int, ...]  # blocks of each group that are copied into its first own one
    is_fork: bool
