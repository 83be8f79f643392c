"""Counts the requests admitted in the last minute and compares them with limits. Does no I/O.

Time is divided into buckets of one second, numbered by Redis's clock. A window is the current
bucket and the 60 before it, so it always covers at least a minute:
    bucket   n-61 | n-60 ... n-1 | n (current)
             gone | ---- counted, 60 to 61 s ----
So no 60 seconds contain more than the limit. Used capacity is available again after 60 to 61
seconds.

Two other algorithms do not fit. Two weighted windows may allow twice the limit, because they only
estimate when the requests of the previous minute came. GCRA cannot serve a single request that is
larger than its burst size.
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
    """A tenant's requests and tokens in a window, and the number of running requests."""

    requests: int = 0
    tokens: int = 0
    running: int = 0


@dataclass(slots=True)
class Window:
    """The counts of a window: bucket -> [requests, tokens]."""

    buckets: dict[int, list[int]] = field(default_factory=dict)

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Adds to a bucket; negative numbers subtract.

        Negative numbers have no effect on a bucket that was dropped.
        """
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
        """Drops the buckets that are not counted at `now_ms`.

        Buckets far in the future are dropped, too. They remain if Redis's clock was set back, for
        example by a fail-over to another machine.
        """
        now = bucket_of(now_ms)
        for bucket in [b for b in self.buckets if not -NUM_BUCKETS < b - now < NUM_BUCKETS]:
            del self.buckets[bucket]

    def use(self, running: int = 0) -> Use:
        counts = self.buckets.values()
        return Use(sum(c[0] for c in counts), sum(c[1] for c in counts), running)

    def joined(self, other: "Window") -> "Window":
        """Returns a window with the sums of the counts of both windows."""
        both = Window({b: list(c) for b, c in self.buckets.items()})
        for bucket, (requests, tokens) in other.buckets.items():
            both.add(bucket, requests, tokens)
        return both

    def frees_at_ms(self, kind: Kind, needed: float) -> int:
        """Returns when `needed` of the counted requests or tokens will no longer be counted.

        The result is in ms on Redis's clock.
        """
        column = 0 if kind == "requests" else 1
        freed = 0.0
        for bucket in sorted(self.buckets):
            freed += self.buckets[bucket][column]
            if freed >= needed:
                return (bucket + NUM_BUCKETS) * BUCKET_MS
        return (max(self.buckets, default=0) + NUM_BUCKETS) * BUCKET_MS

    def flat(self) -> list[int]:
        """Returns [bucket, requests, tokens, ...], the format of the Redis script."""
        return [n for bucket, counts in self.buckets.items() for n in (bucket, *counts)]


def window_of(flat: Iterable[int]) -> Window:
    """Returns the window of a `flat` list. A bucket may occur more than once."""
    window = Window()
    numbers = iter(flat)
    for bucket, requests, tokens in zip(numbers, numbers, numbers, strict=True):
        window.add(bucket, requests, tokens)
    return window


class Share(NamedTuple):
    """The fractions of a tenant's limits that one router may use.

    Both fractions are 1 while Redis decides, because Redis knows the use on all routers.
    """

    requests: float = 1.0
    tokens: float = 1.0


WHOLE = Share()


def share_of(own: Use, others: Use) -> Share | None:
    """Returns the fractions of a tenant's traffic that this router admitted; None without traffic.

    `own` is the use on this router, and `others` the use on all other routers.
    """
    total = Use(own.requests + others.requests, own.tokens + others.tokens)
    if not total.requests:
        return None
    requests = own.requests / total.requests
    return Share(requests, own.tokens / total.tokens if total.tokens else requests)


def exceeded(limits: Limits, use: Use, tokens: int, share: Share = WHOLE) -> Kind | None:
    """Returns the limit that one more request of `tokens` tokens would exceed; None if none."""
    rpm = limits.requests_per_minute
    tpm = limits.tokens_per_minute
    most = limits.max_concurrent
    if rpm and use.requests + 1 > rpm * share.requests:
        return "requests"
    if tpm and use.tokens + tokens > tpm * share.tokens:
        return "tokens"
    # Round up, so that a router with a small share may still run one request.
    if most and use.running + 1 > math.ceil(most * share.requests):
        return "concurrent"
    return None
