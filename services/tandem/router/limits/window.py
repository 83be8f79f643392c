"""Counts what was admitted in the last minute, and compares it with limits. Pure.

Time is cut into buckets of a second, numbered by Redis' clock. A window is the bucket of now and
the 60 before it, so it never covers less than a minute:

    bucket   n-61 | n-60 ... n-1 | n
             gone | ---- counted, 60 to 61 s ----

So no 60 seconds hold more than the limit, and what was used comes back at most a second late. Two
weighted windows hold less state, but guess how the last minute's use was spread and let through up
to twice the limit; GCRA with a small burst could not serve a single request that is larger.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.net.security.limits import Limits

BUCKET_MS = 1000
NUM_BUCKETS = 61
WINDOW_MS = BUCKET_MS * NUM_BUCKETS

Kind = Literal["requests", "tokens", "concurrent"]


def bucket_of(now_ms: float) -> int:
    return int(now_ms // BUCKET_MS)


class Use(NamedTuple):
    """The use of a tenant in a window, and how many of its requests run."""

    requests: int = 0
    tokens: int = 0
    running: int = 0


@dataclass(slots=True)
class Window:
    """Requests and tokens by bucket, as [requests, tokens]."""

    buckets: dict[int, list[int]] = field(default_factory=dict)

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Adds to a bucket; negative numbers give back. A bucket that is gone stays gone."""
        counts = self.buckets.get(bucket)
        if counts is None:
            if requests < 0 or tokens < 0:
                return
            counts = self.buckets[bucket] = [0, 0]
        counts[0] += requests
        counts[1] += tokens
        if not any(counts):
            del self.buckets[bucket]

    def forget(self, now_ms: float) -> None:
        """Forgets the buckets that are not counted at `now_ms`.

        Those far ahead are of a clock that was set back, as by a fail-over of Redis.
        """
        now = bucket_of(now_ms)
        for bucket in [b for b in self.buckets if not -NUM_BUCKETS < b - now < NUM_BUCKETS]:
            del self.buckets[bucket]

    def use(self, running: int = 0) -> Use:
        counts = self.buckets.values()
        return Use(sum(c[0] for c in counts), sum(c[1] for c in counts), running)

    def joined(self, other: "Window") -> "Window":
        """A window with the counts of both."""
        both = Window({b: list(c) for b, c in self.buckets.items()})
        for bucket, (requests, tokens) in other.buckets.items():
            both.add(bucket, requests, tokens)
        return both

    def frees_at_ms(self, kind: Kind, needed: float) -> int:
        """Returns when so many of the requests or tokens are no longer counted."""
        column = 0 if kind == "requests" else 1
        freed = 0.0
        for bucket in sorted(self.buckets):
            freed += self.buckets[bucket][column]
            if freed >= needed:
                return (bucket + NUM_BUCKETS) * BUCKET_MS
        return (max(self.buckets, default=0) + NUM_BUCKETS) * BUCKET_MS

    def flat(self) -> list[int]:
        """Bucket, requests, tokens, and so on: as Redis' script takes and gives it."""
        return [n for bucket, counts in self.buckets.items() for n in (bucket, *counts)]


def window_of(flat: Iterable[int]) -> Window:
    """The window that `flat` described. A bucket may come more than once."""
    window = Window()
    numbers = iter(flat)
    for bucket, requests, tokens in zip(numbers, numbers, numbers, strict=True):
        window.add(bucket, requests, tokens)
    return window


class Share(NamedTuple):
    """The part of a tenant's limits that one router may use; 1 where Redis knows the whole use."""

    requests: float = 1.0
    tokens: float = 1.0


WHOLE = Share()


def share_of(own: Use, others: Use) -> Share | None:
    """Returns which part of a tenant's traffic was the router's own; None without traffic."""
    total = Use(own.requests + others.requests, own.tokens + others.tokens)
    if not total.requests:
        return None
    requests = own.requests / total.requests
    return Share(requests, own.tokens / total.tokens if total.tokens else requests)


def exceeded(limits: Limits, use: Use, tokens: int, share: Share = WHOLE) -> Kind | None:
    """Returns the limit that one more request of so many tokens would exceed; None if none."""
    rpm = limits.requests_per_minute
    tpm = limits.tokens_per_minute
    most = limits.max_concurrent
    if rpm and use.requests + 1 > rpm * share.requests:
        return "requests"
    if tpm and use.tokens + tokens > tpm * share.tokens:
        return "tokens"
    # Rounded up: a router with a small share may still run one.
    if most and use.running + 1 > math.ceil(most * share.requests):
        return "concurrent"
    return None
