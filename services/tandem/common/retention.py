"""The wishes for the KV of a request after its end, and their outcome: plain data that travels by
msgspec.
"""

from __future__ import annotations

import msgspec

WEIGHT_DEFAULT = 100  # of a tenant; as that of a Linux cgroup's `cpu.weight`
# The range and the default of TensorRT-LLM's retention priorities (KvCacheRetentionConfig).
PRIORITY_MIN, PRIORITY_DEFAULT, PRIORITY_MAX = 0, 35, 100


class Retention(msgspec.Struct, frozen=True):
    """A request's wishes for its KV. Without any, it is cached as long as there is room."""

    returns: bool = False  # the prompt is likely to come again: tiers take it at its first use
    pin_s: float = 0.0  # its blocks are evicted last for so many seconds after its end; 0: not so
    weight: int = WEIGHT_DEFAULT  # of its tenant, by which tenants share what may be pinned
    num_tokens: int = 0  # first ones of the prompt that are pinned; 0: all, and the answer
    priority: int = PRIORITY_DEFAULT  # of its blocks in tiers with the policy `priority`


class Kept(msgspec.Struct, frozen=True):
    """The outcome of a wish to pin a chain of blocks."""

    num_blocks: int  # the chain's first ones, which are pinned now
    reason: str = ""  # why no more of them are; empty: all are


NO_RETENTION = Retention()
