"""Classifies why a request went where it did, for a counter and for people.

    prefix             who has the most of the prompt got it
    load_over_prefix   somebody has more of it, but is too busy, or slow, for that to pay
    load               nobody has any of it

Pure.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from tandem.router.placement.choose import Placement
from tandem.router.placement.costs import Work, cached_tokens

Reason = Literal["prefix", "load_over_prefix", "load"]
REASONS: tuple[Reason, ...] = get_args(Reason)
PLACEMENT_HEADER = "x-tandem-placement"  # in a request: asks for the line; in its answer: the line
TIMING_HEADER = "x-tandem-timing"  # in a request: asks for its stages, in `server-timing`
_NO = ("", "0", "false", "no", "off")


def reason_of(work: Work, placement: Placement, matches: Mapping[str, int]) -> Reason:
    """Returns why the request was placed there; `matches` is what `choose` took."""
    reused = work.num_tokens - placement.tokens_missing
    holders = placement.prefix_holders
    if any(cached_tokens(work, holder, matches) > reused for holder in holders):
        return "load_over_prefix"
    return "prefix" if reused else "load"


def asks(value: str | None) -> bool:
    """Returns whether a client that sent this value of a header wants the answer to it."""
    return value is not None and value.strip().lower() not in _NO
