"""Requests to retain KV after a request's end, and their result: plain data, encoded by msgspec."""

from __future__ import annotations

import msgspec

WEIGHT_DEFAULT = 100  # weight of a tenant if no weight is configured; see `Retention.weight`
# The range and the default of TensorRT-LLM's retention priorities (KvCacheRetentionConfig).
PRIORITY_MIN, PRIORITY_DEFAULT, PRIORITY_MAX = 0, 35, 100


class Retention(msgspec.Struct, frozen=True):
    """How long a request's KV is retained. By default, the KV is cached as long as there is
    room."""

    # True: the prompt is likely to be sent again, so its KV is copied to tiers at the first use.
    returns: bool = False
    # Number of seconds after the request's end in which the request's blocks are pinned. Pinned
    # blocks are evicted only if no other block can be evicted. 0: the blocks are not pinned.
    pin_s: float = 0.0
    # Weight of the request's tenant. Of the blocks that can be pinned, a tenant with weight 200 may
    # pin twice as many as one with weight 100.
    weight: int = WEIGHT_DEFAULT
    # Number of tokens at the start of the prompt whose blocks are pinned. 0: the blocks of the
    # whole prompt and of the completion are pinned.
    num_tokens: int = 0
    # Priority of the request's blocks in tiers with the eviction policy `priority`.
    priority: int = PRIORITY_DEFAULT


class Kept(msgspec.Struct, frozen=True):
    """The result of a request to pin the blocks of a chain of block hashes."""

    num_blocks: int  # number of blocks at the start of the chain that are pinned now
    reason: str = ""  # why the other blocks of the chain are not pinned; empty if all are pinned


NO_RETENTION = Retention()
