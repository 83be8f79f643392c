"""Counts the requests admitted in the last minute and compares them with limits. Does no I/O.

Requests are counted in buckets of one second, numbered by Redis's clock. The window is the current
bucket n and the 60 buckets before it:
    bucket   n-61           n-60 ... n-1      n
             not counted    counted           counted, has just begun
So every request is counted for at least 60 and at most 61 seconds after its admission, and a tenant
is never admitted more than its limit in any 60 seconds.

Two other algorithms do not fit. A sliding-window counter with two weighted minutes may admit up to
twice the limit, because it only estimates when the requests of the previous minute came. GCRA
(a leaky bucket) can never admit a single request that needs more tokens than its burst size.
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
        """Adds to the counts of a bucket. Negative numbers give back what was reserved.

        Negative numbers have no effect if the bucket is no longer in the window.
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

        Buckets more than a minute in the future are dropped, too. There are such buckets after
        Redis's clock was set back, for example by a fail-over to another machine.
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
        """Returns the time at which `needed` requests or tokens will have left the window.

        The time is in ms on Redis's clock. The oldest requests leave the window first.
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
    """Returns the window of the list [bucket, requests, tokens, bucket, requests, tokens, ...].

    If a bucket occurs more than once, its counts are added.
    """
    window = Window()
    numbers = iter(flat)
    for bucket, requests, tokens in zip(numbers, numbers, numbers, strict=True):
        window.add(bucket, requests, tokens)
    return window


class Share(NamedTuple):
    """The fractions of a tenant's limits per minute that one router may admit, 0 to 1.

    While Redis answers, both fractions are 1, because Redis counts the use on all routers.
    """

    requests: float = 1.0
    tokens: float = 1.0


WHOLE = Share()


def share_of(own: Use, others: Use) -> Share | None:
    """Returns which fractions of a tenant's requests and tokens this router admitted.

    `own` is the use on this router, and `others` the use on all other routers. Returns None if no
    router admitted a request.
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
    # Round up: with a limit of 4 and a share of 0.1, this router may still run one request.
    if most and use.running + 1 > math.ceil(most * share.requests):
        return "concurrent"
    return None
