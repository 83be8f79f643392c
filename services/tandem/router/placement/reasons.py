"""Classifies why a request was placed on its workers, for a counter and for operators. No I/O.

Reason             Meaning
prefix             the chosen worker has a part of the prompt cached, and no worker has more
load_over_prefix   another worker has more of the prompt cached, but was too busy or too slow
load               no worker has any of the prompt cached
"""

from typing import Literal, get_args

from tandem.common.units import format_ms
from tandem.router.placement.choose import NEAR_BEST_S, Placement
from tandem.router.placement.costs import Work

Reason = Literal["prefix", "load_over_prefix", "load"]
REASONS: tuple[Reason, ...] = get_args(Reason)
# If a request has this header, the response describes the request's placement in a header of the
# same name.
PLACEMENT_HEADER = "x-tandem-placement"
# If a request has this header, the response lists the times of the request's stages (such as queue
# and prefill) in the header `server-timing`.
TIMING_HEADER = "x-tandem-timing"
_NO = ("", "0", "false", "no", "off")


def reason_of(work: Work, placement: Placement) -> Reason:
    """Returns why the request got this placement."""
    reused = work.num_tokens - placement.tokens_missing
    holders = placement.prefix_holders
    if any(holder.num_tokens(work) > reused and not holder.load_s for holder in holders):
        return "load_over_prefix"
    return "prefix" if reused else "load"


def sentence_of(kind: Reason, placement: Placement) -> str:
    """Says in words why the request got this placement; "" if costs were not compared."""
    if placement.priced is None:
        return ""
    decode = placement.decode
    reused = placement.priced.reused.num_tokens
    all_reused = placement.num_tokens - placement.tokens_missing
    holder = decode if reused >= all_reused else placement.prefill_worker
    load = decode.load
    busy = (
        f"{load.num_decoding} decoding, {load.num_in_prefill} in prefill"
        f" and {load.num_waiting} queued"
    )
    # The cost has the pull or the computation of the prompt, whichever is sooner. If a prefill
    # worker computes it, the time there comes on top.
    apart = ", without the time at a prefill worker," if placement.prefill_candidates else ""
    delay = f"predicted delay{apart} was {format_ms(1000 * placement.priced.cost_s)}, with {busy}"
    other = placement.runner_up
    is_holder = kind == "prefix" and holder is decode
    # the next best worker, if it holds as much of the prompt
    tied = other if is_holder and other and other.reused.num_tokens >= all_reused else None
    whose = "Its" if is_holder and not tied else f"{decode.worker_id}'s"
    rest = f"{decode.worker_id} was the only decode worker to choose from."
    if decode.role == "prefill":
        rest = "The request also decodes there, because the decode workers were much busier."
    elif other:
        rest = (
            f"{whose} {delay}. Next best was {other.worker.worker_id}:"
            f" {format_ms(1000 * other.cost_s)}, with {other.reused.num_tokens:,} tokens held."
        )
    match kind:
        case "prefix":
            held = f"{all_reused:,} of the {placement.num_tokens:,} prompt tokens in whole blocks"
            if tied:
                both = f"{decode.worker_id} and {tied.worker.worker_id} already held {held} each"
                if tied.cost_s > placement.priced.cost_s + NEAR_BEST_S:
                    return f"{both}, so the shorter predicted delay decided. {rest}"
                return f"{both}, and their predicted delays are about the same. {rest}"
            return f"{holder.worker_id} already held {held}, and no worker held more. {rest}"
        case "load_over_prefix":
            return f"A worker that held more of the prompt was too busy. {rest}"
        case _:
            return f"No worker held a part of the prompt, so the load decided. {rest}"


def asks(value: str | None) -> bool:
    """Returns whether a request header was sent and its value does not mean no, such as "0"."""
    return value is not None and value.strip().lower() not in _NO
