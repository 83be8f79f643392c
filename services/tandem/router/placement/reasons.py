"""Classifies why a request was placed on its workers, for a counter and for operators. No I/O.

Reason             Meaning
prefix             no worker has more of the prompt cached than the chosen worker
load_over_prefix   another worker has more of the prompt cached, but was too busy or too slow
load               no worker has any of the prompt cached
"""

from collections.abc import Mapping
from typing import Literal, get_args

from tandem.router.placement.choose import Placement
from tandem.router.placement.costs import Work, cached_tokens

Reason = Literal["prefix", "load_over_prefix", "load"]
REASONS: tuple[Reason, ...] = get_args(Reason)
# In a request, this header requests a description of the placement. In the response, it has the
# description.
PLACEMENT_HEADER = "x-tandem-placement"
TIMING_HEADER = "x-tandem-timing"  # requests the stages' times in the header `server-timing`
_NO = ("", "0", "false", "no", "off")


def reason_of(work: Work, placement: Placement, matches: Mapping[str, int]) -> Reason:
    """Returns why the request got this placement. `matches` must be what `choose` got."""
    reused = work.num_tokens - placement.tokens_missing
    holders = placement.prefix_holders
    if any(cached_tokens(work, holder, matches) > reused for holder in holders):
        return "load_over_prefix"
    return "prefix" if reused else "load"


def asks(value: str | None) -> bool:
    """Returns whether the value of a request header requests the corresponding response header."""
    return value is not None and value.strip().lower() not in _NO
