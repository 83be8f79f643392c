"""Requests to retain KV after a request's end, and their result: plain data, encoded by msgspec."""

from __future__ import annotations

import msgspec

WEIGHT_DEFAULT = 100  # weight of a tenant, as in a Linux cgroup's `cpu.weight`
# The range and the default of TensorRT-LLM's retention priorities (KvCacheRetentionConfig).
PRIORITY_MIN, PRIORITY_DEFAULT, PRIORITY_MAX = 0, 35, 100


class Retention(msgspec.Struct, frozen=True):
    """A request's retention of its KV. By default, it is cached as long as there is room."""

    # the prompt is likely to be sent again, so tiers copy it at its first use
    returns: bool = False
    pin_s: float = 0.0  # time after the end for which its blocks are evicted last; 0: none
    # weight of its tenant, which determines the tenant's part of the pinnable blocks
    weight: int = WEIGHT_DEFAULT
    num_tokens: int = 0  # number of the prompt's first tokens to pin; 0: all, and the answer
    priority: int = PRIORITY_DEFAULT  # priority of its blocks in tiers with the policy `priority`


class Kept(msgspec.Struct, frozen=True):
    """The result of a request to pin a chain of blocks."""

    num_blocks: int  # first blocks of the chain that are pinned now
    reason: str = ""  # reason why no more are pinned; empty if all are


NO_RETENTION = Retention()
