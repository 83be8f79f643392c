"""Requests to retain KV after a request's end, and their result: plain data, encoded by msgspec."""

from __future__ import annotations

import msgspec

WEIGHT_DEFAULT = 100  # weight of a tenant, as in a Linux cgroup's `cpu.weight`
# The range and the default of TensorRT-LLM's retention priorities (KvCacheRetentionConfig).
PRIORITY_MIN, PRIORITY_DEFAULT, PRIORITY_MAX = 0, 35, 100


class Retention(msgspec.Struct, frozen=True):
    """How long a request's KV is retained. By default, the KV is cached as long as there is
    room."""

    # True: the prompt is likely to be sent again, so tiers copy its KV at the first use.
    returns: bool = False
    # the request's blocks are evicted last for this many seconds after its end; 0: they are not
    pin_s: float = 0.0
    # The weight of the request's tenant. It determines the tenant's share of the blocks that can be
    # pinned.
    weight: int = WEIGHT_DEFAULT
    # number of the prompt's first tokens to pin; 0: the whole prompt and its answer
    num_tokens: int = 0
    # priority of the request's blocks in tiers with the policy `priority`
    priority: int = PRIORITY_DEFAULT


class Kept(msgspec.Struct, frozen=True):
    """The result of a request to pin the blocks of a chain of block hashes."""

    num_blocks: int  # number of leading blocks of the chain that are pinned now
    reason: str = ""  # why no further blocks are pinned; empty if all are pinned


NO_RETENTION = Retention()
