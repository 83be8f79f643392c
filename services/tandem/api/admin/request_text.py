"""Says in words where the time of a request went, for the operators' page. No I/O.

A `Request` is the dictionary that `RequestRecord.as_dict` returns. It has the duration of each
stage, but not the time at which the stage began. This time is computed from `created` (by the
router's clock) and the durations of the earlier stages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.common.units import format_ms
from tandem.router.metrics.timeline import STAGES, TTFT_STAGES, TtftStage

# A prompt counts as computed during another request's stage (queue or prefill) if its prefill
# overlaps more than this fraction of that stage.
_OVERLAP_MIN = 0.1

Request = Mapping[str, Any]
_Span = tuple[float, float]  # begin and end, in milliseconds since the epoch


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 request` or `1,200 requests`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """Returns a share from 0 to 1 as `0%`, `<1%` or `34%`."""
    return percents((share, 1 - share))[0]


def percents(shares: Sequence[float]) -> list[str]:
    """Returns shares that sum to 1, such as `33%`, `33%` and `34%`. The percentages sum to 100.

    Each share but the last is rounded, as the page's tiles do. The last one is the rest; if the
    others have no rest, a percent is taken off the largest share. A share between 0 and 0.01 is
    `<1%`, and one that rounds to 100 without being 1 is `>99%`.
    """
    whole = [math.floor(100 * share + 0.5) for share in shares[:-1]]
    if sum(whole) > 100:
        whole[whole.index(max(whole))] -= sum(whole) - 100
    whole.append(100 - sum(whole))
    return [_percent(share, number) for share, number in zip(shares, whole, strict=True)]


def _percent(share: float, number: int) -> str:
    if 0 < share < 0.01 or number <= 0 < share:
        return "<1%"
    return ">99%" if share < 1 and number >= 100 else f"{number}%"


def prefilled_at(request: Request) -> str:
    """Returns the id of the worker that computed the prompt or a part of it, before the first
    token. Returns "" if no worker has the request yet."""
    return str(request["prefill_worker"] or _first_decode(request))


def _first_decode(request: Request) -> str:
    """Returns the id of the decode worker that sent the first token. Before the first token, it is
    the worker that has the request; "" if none has it."""
    return str(request["first_decode_worker"] or request["decode_worker"])


def waited_at(request: Request) -> str:
    """Returns the id of the worker in whose queue the request spent most of its queue time. Returns
    "" if it waited in the router."""
    queue_ms, workers_ms = request["stages_ms"].get("queue", 0.0), request["worker_queue_ms"]
    if request["first_decode_worker"] and workers_ms < queue_ms / 2:
        return ""
    # `prefill_queue_ms` is 0 if it is not known.
    if request["prefill_worker"] and 0 < request["prefill_queue_ms"] < workers_ms / 2:
        return _first_decode(request)
    return prefilled_at(request)


def prefill_choice(request: Request) -> str:
    """Returns a sentence with the predictions by which the decode worker chose where the prompt is
    computed. Returns "" if no choice is known."""
    local_ms, remote_ms = request["local_prefill_ms"], request["remote_prefill_ms"]
    if not (local_ms and remote_ms and request["first_decode_worker"]):
        return ""
    decode, prefill = request["first_decode_worker"], request["prefill_worker"]
    here = f"{format_ms(local_ms)} at {decode} with the delay of its running requests"
    there = (
        f"{format_ms(remote_ms)} at {prefill or 'the best prefill worker'} with the pull of its KV"
    )
    both = f"{there}, and {here}" if prefill else f"{here}, and {there}"
    return f"{prefill or decode} computed the prompt: the prediction was {both}."


def longest_stage(request: Request, others: Iterable[Request]) -> str:
    """Returns the request's longest stage in words, such as "1.9 s waiting for prefill-0, which
    computed 2 longer prompts". Returns "" if no stage has ended.

    `others` are the requests of about the same time; the request itself may be among them.
    """
    stages = request["stages_ms"]
    known = [name for name in STAGES if stages.get(name)]
    if not known:
        return ""
    name = max(known, key=stages.__getitem__)
    return f"{format_ms(stages[name])} {_in_words(name, request, others)}"


def longest_name(stages_ms: Mapping[TtftStage, float]) -> str:
    """Describes the longest of the stages before the first token, such as "choosing workers"."""
    names = {
        "tokenize": "tokenizing prompts",
        "route": "choosing workers",
        "queue": "waiting in queues",
        "prefill": "prefill (computing prompts, and waiting behind other prompts)",
        "wire": "sending messages between processes",
        "retry": "starting again after a worker was lost or full",
    }
    return names[longest_of(stages_ms)]


def longest_of(stages_ms: Mapping[TtftStage, float]) -> TtftStage:
    """Returns the longest of the stages before the first token; of equal ones, the first."""
    return max(TTFT_STAGES, key=lambda name: stages_ms.get(name, 0.0))


def _in_words(name: str, request: Request, others: Iterable[Request]) -> str:
    worker = prefilled_at(request)
    decode = _first_decode(request) or "a decode worker"
    match name:
        case "tokenize":
            return f"tokenizing the prompt of {request['usage']['prompt_tokens']:,} tokens"
        case "route":
            return "choosing workers in the router"
        case "queue":
            return _waiting(request, others, worker)
        case "prefill":
            return _computing(request, others, worker)
        case "wire":
            return f"sending messages between the router and {decode}"
        case "retry":
            return "at a worker that was lost or refused the request"
        case "transfer_exposed":
            blocks = count(request["blocks_pulled"], "KV block")
            return (
                f"waiting for {blocks} from {worker} over {request['transport'] or 'the network'}"
            )
        case "first_decode":
            return f"computing the second token on {decode}"
        case _:
            return _moving(request)


def _moving(request: Request) -> str:
    """Says between which workers a request moved; it may have moved several times."""
    first, last, moves = _first_decode(request), request["decode_worker"], request["moves"]
    lost = count(request["workers_lost"], "worker") if request["workers_lost"] else ""
    why = f", because {lost} {'was' if lost == '1 worker' else 'were'} lost" if lost else ""
    way = f"from {first} to {last}" if first != last else f"to {last}"
    times = f" {moves} times," if moves > 1 else ""
    return f"without a token, while the request moved{times} {way}{why}"


def _waiting(request: Request, others: Iterable[Request], worker: str) -> str:
    queue_ms = request["stages_ms"]["queue"]
    if (request["shared_wait_ms"] or 0.0) > queue_ms / 2:
        return "waiting for another request, which computed the same beginning of the prompt"
    if not (at := waited_at(request)):
        return "waiting in the router, for a turn or for a decode worker that is ready"
    if at != worker:
        return f"waiting in the queue of {at}, before a prefill worker got its prompt"
    ahead = ""
    if tokens := request["tokens_ahead"]:
        ahead = f" behind {count(tokens, 'prompt token')}"
    computed = _computed_during(_span(request, "queue"), request, others)
    if not computed:
        return f"waiting for {worker}{ahead}"
    longer = sum(_computed_tokens(each) > _computed_tokens(request) for each in computed)
    if longer == len(computed):
        return f"waiting for {worker}{ahead}, which computed {count(longer, 'longer prompt')}"
    some = f", {longer} of them longer" if longer else ""
    number = count(len(computed), "other prompt")
    return f"waiting for {worker}{ahead}, which computed {number}{some}"


def _computing(request: Request, others: Iterable[Request], worker: str) -> str:
    all_tokens = request["usage"]["prompt_tokens"]
    tokens = _computed_tokens(request)
    what = f"{tokens:,} of {all_tokens:,}" if tokens < all_tokens else f"{tokens:,}"
    itself = "" if request["prefill_worker"] else " itself, without a prefill worker"
    among = []
    if tokens_ahead := request["tokens_ahead"]:
        among.append(f"behind {count(tokens_ahead, 'token')} of earlier prompts")
    if beside := len(_computed_during(_span(request, "prefill"), request, others)):
        among.append(f"beside {count(beside, 'other prompt')}")
    place = f", {' and '.join(among)}" if among else ""
    return f"in prefill on {worker}, which computed {what} prompt tokens{itself}{place}"


def _computed_tokens(request: Request) -> int:
    usage = request["usage"]
    return int(usage["prompt_tokens"] - usage["cached_tokens"])


def _computed_during(span: _Span, request: Request, others: Iterable[Request]) -> list[Request]:
    """Returns the other requests whose prompts were prefilled by the same worker during `span`."""
    worker = prefilled_at(request)
    shortest_ms = _OVERLAP_MIN * (span[1] - span[0])
    return [
        other
        for other in others
        if other["id"] != request["id"]
        and prefilled_at(other) == worker
        and other["stages_ms"].get("prefill")
        and _overlap_ms(span, _span(other, "prefill")) > shortest_ms
    ]


def _span(request: Request, stage: str) -> _Span:
    stages = request["stages_ms"]
    begin = 1000 * request["created"] + sum(
        stages.get(name, 0.0) for name in TTFT_STAGES[: TTFT_STAGES.index(stage)]
    )
    return begin, begin + stages.get(stage, 0.0)


def _overlap_ms(one: _Span, other: _Span) -> float:
    return min(one[1], other[1]) - max(one[0], other[0])
