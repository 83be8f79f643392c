"""Classifies why a request was placed on its workers, for a counter and for operators. Pure.

prefix             the worker with the most of the prompt was chosen
load_over_prefix   a worker with more of the prompt was too busy or too slow
load               no worker has any of the prompt
"""

from collections.abc import Mapping
from typing import Literal, get_args

from tandem.router.placement.choose import Placement
from tandem.router.placement.costs import Work, cached_tokens

Reason = Literal["prefix", "load_over_prefix", "load"]
REASONS: tuple[Reason, ...] = get_args(Reason)
# in a request: asks for the placement line; in its answer: the line
PLACEMENT_HEADER = "x-tandem-placement"
TIMING_HEADER = "x-tandem-timing"  # in a request: asks for its stages in `server-timing`
_NO = ("", "0", "false", "no", "off")


def reason_of(work: Work, placement: Placement, matches: Mapping[str, int]) -> Reason:
    """Returns why the request was placed there. `matches` is the argument of `choose`."""
    reused = work.num_tokens - placement.tokens_missing
    holders = placement.prefix_holders
    if any(cached_tokens(work, holder, matches) > reused for holder in holders):
        return "load_over_prefix"
    return "prefix" if reused else "load"


def asks(value: str | None) -> bool:
    """Returns whether this value of a request header asks for the corresponding response header."""
    return value is not None and value.strip().lower() not in _NO
