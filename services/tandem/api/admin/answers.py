"""Answers an operator's questions in words, for the operators' page. No I/O.

  slow         What is slow, and why?
  kv           How full is the KV cache?
  minute       What happened in the last minute?
  more_decode  What would one more decode worker change?

The answers about requests are those of one router. A request is the dictionary of
`RequestRecord.as_dict`. All times are in seconds since the epoch.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from tandem.api.admin.request_text import Request, count, longest_name, longest_stage, took
from tandem.common.perf_model.rates import DEFAULT_DECODE, DecodeRate
from tandem.common.worker_load import WorkerLoad, held_shares
from tandem.net.store.cluster_event import ClusterEvent
from tandem.router.metrics.timeline import TTFT_STAGES
from tandem.router.request.log import RUNNING, RequestRecord
from tandem.router.workers.known_worker import KnownWorker

RECENT_S = 60.0
# A first token is called slow if it took longer than this, and a step of decode workers if tokens
# follow each other more slowly than this.
_SLOW_TTFT_MS = 1000.0
_SLOW_ITL_MS = 100.0
_EVENTS_MAX = 3  # largest number of events in an answer
_QUEUE_LONG_S = (
    0.5  # seconds of queued prompts for each prefill worker that are called a long queue
)
_DIFFERENCE_MIN = 0.05  # smallest difference of two durations that is called one
_WELL = ("stop", "length", "cancelled")
_NAMES = "\0"  # stands for the names of workers in a sentence about an event
# Kinds of events whose text adds nothing to these words.
_PHRASES = {
    "started": "started",
    "left": "shut down normally",
    "draining": "drains",
    "lost": "was lost",
    "well": "is well again",
}
_COUNTED = ("migrated", "refused")  # the text begins with a number of requests
_OWN_WORDS = ("mode", "role", "transport", "problem", "memory", "prefix tree")
_TIER_NAMES = {"host": "host memory", "disk": "the disk", "store": "the object store"}


def answers_of(
    known: Sequence[KnownWorker],
    requests: Sequence[Request],
    records: Iterable[RequestRecord],
    events: Iterable[ClusterEvent],
    now: float,
) -> dict[str, str]:
    """Answers all questions. `requests` are the latest requests, and `records` are the records of
    all requests that the router remembers."""
    return {
        "slow": slow(requests, now),
        "kv": kv_cache(known),
        "minute": last_minute(records, events, now),
        "more_decode": one_more_decode(known),
    }


def slow(requests: Sequence[Request], now: float) -> str:
    """Says how long first tokens took in the last minute, and what took longest."""
    recent = [
        r
        for r in requests
        if r["ttft_ms"] is not None and r["created"] + r["ttft_ms"] / 1000 > now - RECENT_S
    ]
    waiting = [r for r in requests if r["ttft_ms"] is None and r["outcome"] == RUNNING]
    oldest_s = max((now - r["created"] for r in waiting), default=0.0)
    stuck = ""
    if 1000 * oldest_s > _SLOW_TTFT_MS:
        have = "has" if len(waiting) == 1 else "have"
        stuck = f"{count(len(waiting), 'request')} {have} no token yet, the oldest for"
        stuck += f" {oldest_s:.0f} s."
    if not recent:
        return stuck or "Nothing to report: no request got a first token in the last minute."
    slowest = max(recent, key=lambda r: r["ttft_ms"])
    itl_ms = _itl_ms(recent)
    is_slow = slowest["ttft_ms"] > _SLOW_TTFT_MS or bool(stuck)
    is_slow_itl = itl_ms is not None and itl_ms > _SLOW_ITL_MS
    median_ms = statistics.median(r["ttft_ms"] for r in recent)
    sums = {name: sum(r["stages_ms"].get(name, 0.0) for r in recent) for name in TTFT_STAGES}
    share = max(sums.values()) / (sum(sums.values()) or 1.0)
    came = "are slow:" if is_slow else "came after"
    at_most = f", {took(slowest['ttft_ms'])} at most" if len(recent) > 1 else ""
    parts = [
        "" if is_slow or is_slow_itl else "Nothing stands out.",
        f"First tokens {came} {took(median_ms)} at the median of {count(len(recent), 'request')}"
        f"{at_most}. {share:.0%} of that is {longest_name(sums)}.",
        f"The slowest spent {longest_stage(slowest, requests)}." if is_slow else "",
        stuck,
    ]
    if itl_ms is not None:
        parts.append(f"Then a token follows {'only ' if is_slow_itl else ''}every {took(itl_ms)}.")
    return " ".join(filter(None, parts))


def kv_cache(known: Sequence[KnownWorker]) -> str:
    """Says which share of the KV pools is in use, cached and free, and what the tiers hold."""
    loads = [worker.load for worker in known]
    total = sum(load.blocks_total for load in loads)
    if not total:
        return "Not known: no worker is ready."
    used = sum(load.blocks_used for load in loads) / total
    cached = sum(load.blocks_cached for load in loads) / total
    fullest = max(known, key=lambda worker: worker.load.kv_use)
    room = _room(known)
    text = (
        f"{used:.0%} is in use by running requests, {cached:.0%} holds prefixes that later requests"
        f" can reuse, and {max(0.0, 1 - used - cached):.0%} is free{room}."
    )
    if len(known) > 1:
        text += f" The fullest worker is {fullest.record.worker_id} with {fullest.load.kv_use:.0%}"
        text += " in use."
    shares = held_shares(worker.record.tiers for worker in known)
    if tiers := [f"{_TIER_NAMES[name]} {share:.0%}" for name, share in shares.items()]:
        text += f" Of the tiers below it, {' and '.join(tiers)} is taken."
    return text


def last_minute(
    records: Iterable[RequestRecord], events: Iterable[ClusterEvent], now: float
) -> str:
    """Counts the requests that ended in the last minute, and names the latest events, a line
    each."""
    outcomes = Counter(
        record.outcome
        for record in records
        if record.e2e_s is not None and record.created + record.e2e_s > now - RECENT_S
    )
    ended = sum(outcomes.values())
    failed = {name: number for name, number in outcomes.items() if name not in _WELL}
    parts = []
    if ended:
        text = f"{count(ended, 'request')} ended"
        if failed:
            why = ", ".join(f"{number} {name}" for name, number in sorted(failed.items()))
            text += f", and {sum(failed.values())} of them failed: {why}."
        else:
            text += ", and none failed."
        parts.append(text)
    told = _told([event for event in events if event.at > now - RECENT_S], now)
    parts += told[:_EVENTS_MAX]
    if (more := len(told) - _EVENTS_MAX) > 0:
        parts.append(f"The list of events has {more} more.")
    return "\n".join(parts) or "Nothing: no request ended, and no worker came or left."


def _told(events: Iterable[ClusterEvent], now: float) -> list[str]:
    """Returns a sentence for each event, and one for several workers with the same event."""
    same: dict[str, list[ClusterEvent]] = {}
    for event in events:
        same.setdefault(_sentence(event), []).append(event)
    told = []
    for sentence, found in same.items():
        if len(found) > 1:
            for one, several in (("is", "are"), ("was", "were"), ("drains", "drain")):
                sentence = sentence.replace(f"{_NAMES} {one}", f"{_NAMES} {several}")
        sentence = sentence.replace(_NAMES, ", ".join(event.about for event in found))
        end = "" if sentence.endswith((".", "?")) else "."
        told.append(f"{max(0.0, now - found[0].at):.0f} s ago: {sentence}{end}")
    return told


def _sentence(event: ClusterEvent) -> str:
    """Describes an event, with _NAMES for what it is about."""
    if phrase := _PHRASES.get(event.kind):
        return f"{_NAMES} {phrase}"
    if not event.about:
        return event.text
    if event.kind in _COUNTED:
        named = event.text.replace("this worker", _NAMES)
        return named if named != event.text else f"{event.text} ({_NAMES})"
    if event.kind == "ended":
        return f"{_NAMES} {event.text}"
    if event.kind in _OWN_WORDS:
        return f"{_NAMES}: {event.text}"
    return f"{_NAMES} is {event.kind}: {event.text}"


def one_more_decode(known: Sequence[KnownWorker]) -> str:
    """Predicts the effect of another decode worker, from the workers' measured decode rates."""
    decode = _ready(known, "decode")
    if not decode:
        return "Requests would be served: now no decode worker is ready."
    loads = [worker.load for worker in decode]
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting for load in loads)
    room = f"Room for KV of running requests would grow by {1 / len(decode):.0%}."
    parts = ["Nothing for speed: no request decodes now."]
    if num_running or num_waiting:
        parts = [_steps(decode, num_running)]
    if num_waiting:
        parts.append(f"{count(num_waiting, 'request')} waiting at decode workers could start.")
    parts.append(_prefill_queue(_ready(known, "prefill")))
    return " ".join(filter(None, [*parts, room]))


def _steps(decode: Sequence[KnownWorker], num_running: int) -> str:
    """Compares the duration of a decode step with one more worker to that of now."""
    rates = [
        worker.record.rates.decode
        for worker in decode
        if worker.record.rates.measured and worker.record.rates.decode != DEFAULT_DECODE
    ]
    if not rates:
        return "The effect on speed is not known yet: no decode worker has measured its steps."
    each_now = num_running / len(decode)
    each_then = num_running / (len(decode) + 1)
    now_ms = _step_ms(rates, each_now)
    then_ms = _step_ms(rates, each_then)
    if now_ms - then_ms < _DIFFERENCE_MIN * now_ms:
        return f"Little for speed: a decode step would still take {took(then_ms)}."
    return (
        f"A decode step would take {took(then_ms)} instead of {took(now_ms)}, because each worker"
        f" would run {each_then:.1f} requests instead of {each_now:.1f}, if the new worker has"
        " processor cores or a GPU of its own."
    )


def _step_ms(rates: Sequence[DecodeRate], num_sequences: float) -> float:
    return 1000 * statistics.mean(r.step_s + r.sequence_s * max(1.0, num_sequences) for r in rates)


def _prefill_queue(prefill: Sequence[KnownWorker]) -> str:
    if not prefill:
        return ""
    queued_s = sum(worker.load.queue_s(worker.record.rates) for worker in prefill) / len(prefill)
    if queued_s < _QUEUE_LONG_S:
        return ""
    return (
        f"First tokens would still wait: the prompts queued at each prefill worker take"
        f" {queued_s:.1f} s, so one more prefill worker would help more."
    )


def _ready(known: Iterable[KnownWorker], role: str) -> list[KnownWorker]:
    return [
        worker
        for worker in known
        if worker.record.role == role
        and worker.record.state == "ready"
        and (role != "decode" or worker.is_up)
    ]


def _itl_ms(requests: Iterable[Request]) -> float | None:
    """The median of the requests' mean times between tokens; None if no request has ended."""
    found = [
        (r["e2e_ms"] - r["ttft_ms"]) / (r["usage"]["completion_tokens"] - 1)
        for r in requests
        if r["e2e_ms"] is not None and r["usage"]["completion_tokens"] > 1
    ]
    return statistics.median(found) if found else None


def _room(known: Sequence[KnownWorker]) -> str:
    """Says for how many tokens all pools have room; "" if the pools of some layers differ."""
    loads: list[WorkerLoad] = [worker.load for worker in known]
    if any(load.groups for load in loads):
        return ""
    tokens = sum(w.load.blocks_total * w.record.compatibility.block_size for w in known)
    return f", of room for {tokens:,} tokens on {count(len(known), 'worker')}"
