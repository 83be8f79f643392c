"""A tenant's use of its limits: the headers `x-ratelimit-*` and the error of a refused request.

Names and formats are OpenAI's. `x-ratelimit-reset-*` is the time until all current use is older
than a minute and so no longer counted.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from tandem.errors import RateLimited
from tandem.net.security.limits import Limits
from tandem.router.limits.window import BUCKET_MS, WHOLE, Kind, Share, Use, Window

_NOUNS: Mapping[Kind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at once",
}
_CONCURRENT_RETRY_S = 1.0


class Standing(NamedTuple):
    """A tenant's use at one moment, over all routers.

    While Redis is away and each router decides alone (limiter.py), `window` and `running` contain
    only the use on this router, and the router may grant only the fraction `share` of the limits.
    """

    limits: Limits
    window: Window
    running: int
    now_ms: float
    share: Share = WHOLE

    @property
    def use(self) -> Use:
        return self.window.use(self.running)


def limit_headers(standing: Standing) -> dict[str, str]:
    """Returns the headers `x-ratelimit-*` for the API key's limits per minute."""
    limits = standing.limits
    share = standing.share
    use = standing.use
    found: dict[str, str] = {}
    kinds: tuple[tuple[Kind, int, float, float], ...] = (
        ("requests", limits.requests_per_minute, share.requests, use.requests),
        ("tokens", limits.tokens_per_minute, share.tokens, use.tokens),
    )
    for kind, limit, part, used in kinds:
        if limit:
            ends_ms = standing.window.frees_at_ms(kind, used) if used else standing.now_ms
            found |= {
                f"x-ratelimit-limit-{kind}": str(limit),
                f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(limit * part - used))),
                f"x-ratelimit-reset-{kind}": duration(ends_ms - standing.now_ms),
            }
    return found


def refusal(kind: Kind, standing: Standing, tokens: int) -> RateLimited:
    """Returns the error for a request of `tokens` tokens that exceeds the limit `kind`."""
    limits = standing.limits
    share = standing.share
    use = standing.use
    limit, part, used, asked = {
        "requests": (limits.requests_per_minute, share.requests, use.requests, 1),
        "tokens": (limits.tokens_per_minute, share.tokens, use.tokens, tokens),
        "concurrent": (limits.max_concurrent, share.requests, use.running, 1),
    }[kind]
    if kind == "concurrent":
        after_s = _CONCURRENT_RETRY_S
    else:
        frees_ms = standing.window.frees_at_ms(kind, used + asked - limit * part)
        after_s = max(BUCKET_MS, frees_ms - standing.now_ms) / 1000
    alone = "" if part == 1 else f" of the {limit * part:.0f} that this router may grant now"
    error = RateLimited(
        f"the limit of {limit} {_NOUNS[kind]} is reached: {used} used{alone}, and this request "
        f"needs {asked}; try again in {math.ceil(after_s)} s",
        retry_after_s=after_s,
    )
    error.kind = kind
    error.headers = limit_headers(standing)
    return error


def duration(ms: float) -> str:
    """Formats a duration as OpenAI does: `6m0s`, `1s`, `120ms`."""
    if ms <= 0:
        return "0s"
    if ms < 1000:
        return f"{math.ceil(ms)}ms"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
