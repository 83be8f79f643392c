"""Builds the texts that answer four questions of an operator on the operators' page. No I/O.

  slow         What is slow, and why?
  kv           How full is the KV cache?
  minute       What happened in the last minute?
  more_decode  What would one more decode worker change?

Answers about requests cover only the requests of this router. Only the numbers of requests that
decode, are in prefill or are queued are those of all workers and this router. A `Request` is the
dictionary that `RequestRecord.as_dict` returns. All times are in seconds since the epoch.
"""

import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.api.admin.request_text import (
    Request,
    count,
    longest_name,
    longest_of,
    longest_stage,
    percent,
    percents,
    prefilled_at,
    waited_at,
)
from tandem.common.perf_model.rates import DEFAULT_DECODE, DecodeRate
from tandem.common.units import format_ms
from tandem.common.worker_load import WorkerLoad, held_shares
from tandem.net.store.cluster_event import ClusterEvent
from tandem.router.metrics.latencies import Latency
from tandem.router.metrics.timeline import TTFT_STAGES, TtftStage
from tandem.router.request.log import RUNNING, RequestRecord
from tandem.router.workers.known_worker import KnownWorker
from tandem.router.workers.rows import WorkerRow

RECENT_S = 60.0
# The service counts as slow if more than this fraction of the first tokens missed the TTFT target.
_LATE_MAX = 0.05
_EVENTS_MAX = 3  # largest number of events in an answer
# Queues count as long if a pool's workers need at least this many seconds on average for their
# queued prompts, or if recent prompts waited longer than this on average.
_QUEUE_LONG_S = 0.5
_DIFFERENCE_MIN = 0.05  # a step that gets faster by a smaller fraction counts as equally fast
# A worker is named if at least this fraction of all requests' waits or computations was there.
_MOSTLY_MIN = 0.5
_USE_TOLD_MIN = 0.05  # the fullest worker is named if at least this fraction of its KV pool is used
_WELL = ("stop", "length", "cancelled")
_NAMES = "\0"  # placeholder for the names of workers in a sentence about an event
# Kind of event -> phrase that is shown instead of the event's own text.
_PHRASES = {
    "started": "is ready to serve",
    "left": "shut down normally",
    "draining": "drains",
    "lost": "was lost",
    "well": "is well again",
}
_COUNTED = ("migrated", "refused")  # kinds of events whose text begins with a number of requests
_OWN_WORDS = ("mode", "role", "transport", "problem", "memory", "prefix tree")
_ENDED = re.compile(r"its (?:previous )?process (was ended by \w+)")  # in `WorkerRow.note`
# For this many seconds after a restart, the worker's row is checked for the end of its previous
# process. Later, the events contain it.
_NEW_S = 10
_COMING = ("loading", "starting", "restarting")


@dataclass(frozen=True, slots=True)
class Waiting:
    """The open requests that are not decoding.

    `number` is the page's count of requests in prefill or queued. The other two are about the
    requests of this router that have no token.
    """

    number: int = 0
    num_late: int = 0  # number of requests that have waited longer than their target
    oldest_s: float = 0.0  # longest wait


@dataclass(frozen=True, slots=True)
class Service:
    """The latencies of the router's requests in the last minute, the targets for them, and the
    requests that wait."""

    first: Latency = field(default_factory=Latency)  # times to the first token
    following: Latency = field(default_factory=Latency)  # times between tokens
    ttft_target_s: float = 2.0
    itl_target_s: float = 0.1
    waiting: Waiting = field(default_factory=Waiting)

    @property
    def is_slow(self) -> bool:
        """True if too many first tokens were later than the target, or will be."""
        waiting = self.waiting.num_late
        return self.first.num_late + waiting > _LATE_MAX * (self.first.number + waiting)


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The pool for which prompts wait. All figures are of the last minute: queues grow and shrink
    within seconds, and so would the answer."""

    role: Literal["prefill", "decode", ""]  # "": prompts hardly wait, or no prompt came
    # The waits, in a sentence. "": no prompt came.
    evidence: str = ""

    @property
    def cause(self) -> str:
        """The cause of slow first tokens and its remedy, in a sentence; "" if it is not known."""
        pool = {"prefill": "prefill workers", "decode": "decode workers", "": ""}[self.role]
        best = f"one more {self.role} worker would help most"
        return f"In the last minute, prompts waited most for {pool}: {best}." if self.role else ""


def answers_of(
    known: Sequence[KnownWorker],
    rows: Sequence[WorkerRow],
    requests: Sequence[Request],
    records: Sequence[RequestRecord],
    events: Iterable[ClusterEvent],
    service: Service,
    moved: Mapping[str, int],
    queued_s: Mapping[str, float],
    now: float,
) -> tuple[dict[str, str], Bottleneck]:
    """Answers all questions, and returns the bottleneck.

    `known` are the workers that are ready or drain, and `rows` are the rows of all workers.
    `requests` are the latest requests and the slowest one of the last minute, and `records` are the
    records of all requests that the router remembers. `moved` has the number of requests that moved
    off a worker in the last minute. `queued_s` is described at `bottleneck_of`.
    """
    told = {request["id"] for request in requests}
    older = [
        record.as_brief_dict()
        for record in records
        if (ttft_s := record.timeline.ttft_s) is not None
        and record.created + ttft_s > now - RECENT_S
        and record.request_id not in told
    ]
    bottleneck = bottleneck_of(known, [*requests, *older], queued_s, now)
    answers = {
        "slow": slow(requests, service, now, older, known),
        "kv": kv_cache(known),
        "minute": last_minute(records, events, now, service.first.number, moved, rows),
        "more_decode": one_more_decode(known, bottleneck, rows, service.following.median_ms),
    }
    return answers, bottleneck


def waiting_of(
    records: Iterable[RequestRecord],
    now: float,
    number: int,
    *,
    ttft_target_s: float,
    ttft_token_s: float,
) -> Waiting:
    """Returns the requests that wait. `number` is the count of all workers and this router. A first
    token may take `ttft_target_s`, and `ttft_token_s` more for each prompt token."""
    waits_s = []
    num_late = 0
    for record in records:
        if record.outcome == RUNNING and record.timeline.ttft_s is None:
            waits_s.append(now - record.created)
            allowed_s = ttft_target_s + ttft_token_s * record.num_prompt_tokens
            num_late += waits_s[-1] > allowed_s
    return Waiting(number, num_late, max(waits_s, default=0.0))


def verdict(
    rows: Iterable[WorkerRow], service: Service, bottleneck: Bottleneck, *, is_well: bool
) -> str:
    """Returns a sentence about workers that are not ready, and two about slow first tokens and
    their cause. Returns "" if there is neither.

    The page shows the sentences before the problems, or in place of "All is well".
    """
    late = f"{_late(service)} {bottleneck.cause}".strip() if service.is_slow else ""
    if is_well:
        return f"All workers are ready, but {late}" if late else ""
    pools: dict[str, list[WorkerRow]] = {}
    for row in rows:
        if row.state != "stopped":
            pools.setdefault(row.pool, []).append(row)
    short = [
        f"{sum(row.state == 'ready' for row in found)} of {len(found)} {pool} workers are ready"
        for pool, found in pools.items()
        if any(row.state not in ("ready", "draining") for row in found)
    ]
    degraded = f"Degraded: {' and '.join(short)}." if short else ""
    return f"{degraded} {late[:1].upper()}{late[1:]}".strip()


def _late(service: Service) -> str:
    """Says how many first tokens were later than the target, and whether a request has waited
    longer than all of them."""
    first = service.first
    slowest_ms = first.max_ms or 0.0
    parts = []
    if first.num_late:
        parts.append(
            f"{first.num_late} of {first.number} in the last minute took longer than the target of"
            f" {service.ttft_target_s:g} s (median {format_ms(first.median_ms or 0.0)},"
            f" slowest {format_ms(slowest_ms)})"
        )
    if service.waiting.num_late and 1000 * service.waiting.oldest_s > slowest_ms:
        parts.append(f"the oldest request without one has waited {service.waiting.oldest_s:.0f} s")
    return f"first tokens are slow: {', and '.join(parts)}."


def slowest_of(records: Iterable[RequestRecord], now: float) -> RequestRecord | None:
    """Returns the request with the longest TTFT among those whose first token came in the last
    minute. Of equal ones, the first request is returned, so that a later one does not replace it.
    """
    found = [
        (-ttft_s, record.created, record.request_id, record)
        for record in records
        if (ttft_s := record.timeline.ttft_s) is not None
        and record.created + ttft_s > now - RECENT_S
    ]
    return min(found, key=lambda each: each[:3])[3] if found else None


def slow(
    requests: Sequence[Request],
    service: Service,
    now: float,
    older: Iterable[Request] = (),
    known: Iterable[KnownWorker] = (),
) -> str:
    """Says how long first tokens took in the last minute, and what took longest.

    `older` are further requests of the last minute, in the form of `RequestRecord.as_brief_dict`.
    `known` are the workers that have requests.
    """
    first = service.first
    waiting = service.waiting
    recent = [r for r in requests if _is_recent(r, now)]
    stuck = ""
    if waiting.num_late:
        verb = "is" if waiting.number == 1 else "are"
        stuck = f"{count(waiting.number, 'request')} {verb} in prefill or queued now; the longest"
        stuck += f" wait for a first token is {waiting.oldest_s:.0f} s.{_most_queued(known)}"
    if not recent or first.median_ms is None or first.max_ms is None:
        return stuck or "Nothing to report: no request got a first token in the last minute."
    slowest = min(recent, key=lambda r: (-r["ttft_ms"], r["created"], r["id"]))
    itl_ms = service.following.median_ms
    is_slow = service.is_slow or bool(stuck)
    is_slow_itl = itl_ms is not None and itl_ms > 1000 * service.itl_target_s
    sums = {
        name: sum(r["stages_ms"].get(name, 0.0) for r in (*recent, *older)) for name in TTFT_STAGES
    }
    share = max(sums.values()) / (sum(sums.values()) or 1.0)
    came = "are slow:" if is_slow else "came after"
    at_most = f", {format_ms(first.max_ms)} at most" if first.number > 1 else ""
    parts = [
        "" if is_slow or is_slow_itl else "Nothing stands out.",
        f"First tokens {came} {format_ms(first.median_ms)} at the median of the last minute's"
        f" {count(first.number, 'request')}{at_most} (target: {service.ttft_target_s:g} s)."
        f" {share:.0%} of that is {longest_name(sums)}{_where(sums, (*recent, *older))}.",
        f"The slowest spent {longest_stage(slowest, requests)}." if is_slow else "",
        stuck,
    ]
    if itl_ms is not None:
        only = "only " if is_slow_itl else ""
        parts.append(f"Then a token follows {only}every {format_ms(itl_ms)}, at the median.")
    return " ".join(filter(None, parts))


def _where(stages_ms: Mapping[TtftStage, float], requests: Iterable[Request]) -> str:
    """Names the worker at which most of the longest stage took place, if there is one. Returns ""
    if all requests were there, or if the stage is neither a wait nor a computation."""
    name = longest_of(stages_ms)
    if name not in ("queue", "prefill"):
        return ""
    place = waited_at if name == "queue" else prefilled_at
    times_ms: Counter[str] = Counter()
    for request in requests:
        times_ms[place(request)] += request["stages_ms"].get(name, 0.0)
    found, longest_ms = min(times_ms.items(), key=lambda item: (-item[1], item[0]))
    if len(times_ms) == 1 or longest_ms < _MOSTLY_MIN * sum(times_ms.values()):
        return ""
    return f", mostly at {found or 'the router'}"


def _most_queued(known: Iterable[KnownWorker]) -> str:
    """Names the worker with the most prompt tokens to compute. Returns "" if there are none."""
    queued = [(-worker.load.queued_tokens, worker.record.worker_id) for worker in known]
    tokens, worker_id = min(queued, default=(0, ""))
    return f" {worker_id} has the most prompt tokens to compute: {-tokens:,}." if tokens else ""


def kv_cache(known: Sequence[KnownWorker]) -> str:
    """Says which fractions of the KV pools are in use, cached and free, and how full the KV tiers
    are."""
    loads = [worker.load for worker in known]
    total = sum(load.blocks_total for load in loads)
    if not total:
        return "Not known: no worker is ready."
    used = sum(load.blocks_used for load in loads)
    cached = sum(load.blocks_cached for load in loads)
    free = max(0, total - used - cached)
    fullest = min(known, key=lambda worker: (-worker.load.kv_use, worker.record.worker_id))
    texts = percents([number / total for number in (used, cached, free)])
    text = (
        f"{texts[0]} is in use by open requests, {texts[1]} holds prefixes that later requests"
        f" can reuse, and {texts[2]} is free{_room(known)}."
    )
    if len(known) > 1 and fullest.load.kv_use >= _USE_TOLD_MIN:
        text += f" The fullest worker is {fullest.record.worker_id} with"
        text += f" {percent(fullest.load.kv_use)} in use."
    shares = held_shares(worker.record.tiers for worker in known)
    if tiers := [f"{name} {share:.0%}" for name, share in shares.items()]:
        text += f" KV tiers in use: {', '.join(tiers)}."
    return text


def last_minute(
    records: Collection[RequestRecord],
    events: Iterable[ClusterEvent],
    now: float,
    num_first: int,
    moved: Mapping[str, int] | None = None,
    rows: Iterable[WorkerRow] = (),
) -> str:
    """Names the workers that were lost in the last minute, counts the requests that arrived, got
    their first token (`num_first`) or ended, and names the other latest events, a line each."""
    outcomes = Counter(record.outcome for record in records if _ended_at(record) > now - RECENT_S)
    recent = [event for event in events if event.at > now - RECENT_S]
    by_id = {row.worker_id: row for row in rows}
    parts, explained = _lost(recent, moved or {}, by_id, _failed_at(records, now), now)
    arrived = sum(record.created > now - RECENT_S for record in records)
    ended = sum(outcomes.values())
    failed = {name: number for name, number in outcomes.items() if name not in _WELL}
    if arrived or num_first or ended:
        text = f"{count(arrived, 'request')} arrived, {num_first:,} got the first token, and"
        text += f" {ended:,} ended"
        if failed:
            why = ", ".join(f"{number} {name}" for name, number in sorted(failed.items()))
            text += f"; {sum(failed.values())} of these failed: {why}."
        else:
            text += "; none failed."
        parts.append(text)
    told = _told([event for event in recent if event not in explained], now)
    parts += told[:_EVENTS_MAX]
    if (more := len(told) - _EVENTS_MAX) > 0:
        parts.append(f"The list of events has {more} more.")
    return "\n".join(parts) or "Nothing: no request came or ended, and no worker joined or left."


def _lost(
    events: list[ClusterEvent],
    moved: Mapping[str, int],
    rows: Mapping[str, WorkerRow],
    failed: Mapping[str, int],
    now: float,
) -> tuple[list[str], list[ClusterEvent]]:
    """Returns a line for each worker whose process ended or was lost, and the events that these
    lines cover.

    `failed` has the number of requests that failed because their worker was lost.
    """
    lines = []
    explained = []
    found: dict[str, ClusterEvent] = {}
    for event in events:  # newest first; "ended" replaces "lost", because it says how
        is_first = event.about not in found or found[event.about].kind != "ended"
        # When a worker is lost, the event "migrated" of its requests may be the first to arrive.
        is_loss = event.kind == "lost" or (event.kind == "migrated" and "was lost" in event.text)
        if event.kind == "ended" or (is_loss and is_first):
            found[event.about] = event
    for row in rows.values():  # A row shows the end of a process before the events have it.
        since = re.search(r"started (\d+) s ago", row.note)
        if row.worker_id in found or not moved.get(row.worker_id) or not _ENDED.search(row.note):
            continue
        if row.state == "restarting" or (since and int(since[1]) < _NEW_S):
            ago_s = int(since[1]) if since else 0
            found[row.worker_id] = ClusterEvent(now - ago_s, "lost", row.worker_id, "")
    for name, event in sorted(found.items(), key=lambda item: -item[1].at):
        mine = [e for e in events if e.about == name and e.kind in ("ended", "lost", "migrated")]
        num_moved = sum(_number(e.text) for e in mine if e.kind == "migrated")
        num_moved = max(num_moved, moved.get(name, 0))
        num_lost = failed.get(name, 0)
        line = f"{max(0.0, now - event.at):.0f} s ago {name} {_how(event, rows.get(name))}"
        if num_moved or num_lost:
            line += f"; {num_moved} of its requests moved to other workers"
            line += f", and {num_lost} {'was' if num_lost == 1 else 'were'} lost"
        state = rows[name].state if name in rows else ""
        if state in ("ready", *_COMING):
            line += "; it is ready again" if state == "ready" else "; it restarts"
        lines.append(f"{line}.")
        explained += mine
    return lines, explained


def _how(event: ClusterEvent, row: WorkerRow | None) -> str:
    """Says how a worker's process ended, such as "was killed (SIGKILL)"."""
    how = event.text if event.kind == "ended" else "was lost"
    if event.kind != "ended" and row is not None and (known := _ENDED.search(row.note)):
        how = known[1]
    return how.replace("was ended by SIGKILL", "was killed (SIGKILL)")


def _failed_at(records: Collection[RequestRecord], now: float) -> Counter[str]:
    """Counts the requests that failed in the last minute because their worker was lost."""
    return Counter(
        record.facts.get("decode_worker", "")
        for record in records
        if record.outcome == "worker_lost" and _ended_at(record) > now - RECENT_S
    )


def _ended_at(record: RequestRecord) -> float:
    """Returns the time of a request's end; 0 while it runs."""
    return 0.0 if record.e2e_s is None else record.created + record.e2e_s


def _number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _told(events: Iterable[ClusterEvent], now: float) -> list[str]:
    """Returns a sentence for each event. Workers with the same event share one sentence."""
    same: dict[str, list[ClusterEvent]] = {}
    for event in events:
        same.setdefault(_sentence(event), []).append(event)
    told = []
    for sentence, found in same.items():
        if len(found) > 1:
            for one, several in (("is", "are"), ("was", "were"), ("drains", "drain")):
                sentence = sentence.replace(f"{_NAMES} {one}", f"{_NAMES} {several}")
        numbers = Counter(event.about for event in found)
        names = (f"{name}, {n} times" if n > 1 else name for name, n in numbers.items())
        sentence = sentence.replace(_NAMES, ", ".join(names))
        end = "" if sentence.endswith((".", "?")) else "."
        newest, oldest = (f"{max(0.0, now - event.at):.0f}" for event in (found[0], found[-1]))
        when = newest if newest == oldest else f"{newest} to {oldest}"
        told.append(f"{when} s ago: {sentence}{end}")
    return told


def _sentence(event: ClusterEvent) -> str:
    """Returns a sentence about an event, with _NAMES in place of the worker's name."""
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


def one_more_decode(
    known: Sequence[KnownWorker],
    bottleneck: Bottleneck,
    rows: Iterable[WorkerRow] = (),
    itl_ms: float | None = None,
) -> str:
    """Predicts the effect of another decode worker, from the workers' measured decode rates and
    from the bottleneck.

    `itl_ms` is the median time between tokens in the last minute. If decode workers are starting,
    the prediction is for the time when they are ready. It then does not use `itl_ms`, which was
    measured with another number of workers.
    """
    decode = _ready(known, "decode")
    coming = [r.worker_id for r in rows if r.pool == "decode" and r.state in _COMING]
    num_then = len(decode) + max(1, len(coming))
    back = f"{', '.join(coming)} {'is' if len(coming) == 1 else 'are'} starting" if coming else ""
    if not decode:
        return f"Requests would be served. {back or 'No decode worker is ready now'}."
    if back:
        back += f": the figures are for {num_then} decode workers instead of {len(decode)}."
    loads = [worker.load for worker in decode]
    num_decoding = sum(load.num_decoding for load in loads)
    num_queued = sum(worker.num_queued for worker in decode)
    room = f"Room for KV in the decode pool would grow by {num_then / len(decode) - 1:.0%}"
    if tokens := _num_tokens(decode):
        room += f", from {tokens:,} to about {tokens * num_then // len(decode):,} tokens"
    parts = [_on_first_tokens(bottleneck, num_then - len(decode), num_then), back]
    if num_decoding:
        parts.append(_steps(decode, num_decoding, num_then, None if coming else itl_ms))
    else:
        parts.append("The time between tokens would not change: no request is decoding now.")
    if num_queued:
        parts.append(f"{count(num_queued, 'request')} queued at decode workers could start.")
    if bottleneck.role:
        parts.append(bottleneck.evidence)
    return " ".join(filter(None, [*parts, f"{room}."]))


def _on_first_tokens(bottleneck: Bottleneck, num_new: int, num_then: int) -> str:
    """Says whether first tokens would come sooner; "" if it is not known."""
    new = "the new worker" if num_new == 1 else "the new workers"
    match bottleneck.role:
        case "prefill":
            return (
                "Little for first tokens: the bottleneck is prefill, and one more prefill worker"
                " would help more."
            )
        case "decode":
            return (
                f"First tokens would come sooner: the bottleneck is decode, and {new} would take"
                f" over {num_new / num_then:.0%} of the decode workers' prompts."
            )
        case _:
            return f"Little for first tokens: {bottleneck.evidence}" if bottleneck.evidence else ""


def _steps(
    decode: Sequence[KnownWorker], num_decoding: int, num_then: int, itl_ms: float | None
) -> str:
    """Says how much shorter a decode step would be with `num_then` decode workers.

    The step times are predicted for the requests that decode now. The measured time between tokens
    is that of the last minute and has more than decode steps in it, so only the ratio of the
    predictions is applied to it.
    """
    rates = [
        worker.record.rates.decode
        for worker in decode
        if worker.record.rates.measured and worker.record.rates.decode != DEFAULT_DECODE
    ]
    if not rates:
        return "The effect on speed is not known yet: no decode worker has measured its steps."
    each_now = num_decoding / len(decode)
    each_then = num_decoding / num_then
    ratio = _step_s(rates, each_then) / _step_s(rates, each_now)
    fewer = f"{each_then:.1f} decoding requests at each decode worker instead of {each_now:.1f}"
    if ratio > 1 - _DIFFERENCE_MIN:
        return f"The time between tokens would hardly change, with {fewer}."
    text = f"A decode step would be about {1 - ratio:.0%} shorter, with {fewer},"
    text += " if the new worker has processor cores or a GPU of its own."
    if itl_ms is not None:
        text += f" The {format_ms(itl_ms)} between tokens, the last minute's median, would be"
        text += f" {format_ms(ratio * itl_ms)} at best."
    return text


def _step_s(rates: Sequence[DecodeRate], num_sequences: float) -> float:
    return statistics.mean(r.step_s + r.sequence_s * max(1.0, num_sequences) for r in rates)


def bottleneck_of(
    known: Sequence[KnownWorker],
    requests: Sequence[Request],
    queued_s: Mapping[str, float],
    now: float,
) -> Bottleneck:
    """Says for which workers prompts wait.

    Decode workers compute prompts, too, if that is faster than to wait for a prefill worker.
    `queued_s` has, for each role, the seconds that the queued prompts of a worker took in the last
    minute, on average (`History.queued_s`).
    """
    waits_s: dict[str, list[float]] = {"prefill": [], "decode": []}
    roles = {w.record.worker_id: role for role in waits_s for w in _ready(known, role)}
    for request in requests:
        if _is_recent(request, now) and (role := roles.get(waited_at(request))):
            waits_s[role].append(request["stages_ms"].get("queue", 0.0) / 1000)
    of_prefill, of_decode = (queued_s.get(role, 0.0) for role in ("prefill", "decode"))
    all_s = [*waits_s["prefill"], *waits_s["decode"]]
    mean_s = statistics.mean(all_s) if all_s else 0.0
    if max(of_prefill, of_decode) >= _QUEUE_LONG_S:
        return Bottleneck(
            "prefill" if of_prefill >= of_decode else "decode",
            f"A new prompt waits behind others: by the workers' estimates, for {of_prefill:.1f} s"
            f" at a prefill worker, or {of_decode:.1f} s at a decode worker that computes it itself"
            " (means of the last minute).",
        )
    if mean_s >= _QUEUE_LONG_S:
        each = {role: statistics.mean(found) if found else 0.0 for role, found in waits_s.items()}
        return Bottleneck(
            "prefill" if sum(waits_s["prefill"]) >= sum(waits_s["decode"]) else "decode",
            f"In the last minute, a prompt that a prefill worker computed waited"
            f" {each['prefill']:.1f} s, on average, and one that a decode worker computed itself"
            f" {each['decode']:.1f} s.",
        )
    if not all_s:
        return Bottleneck("")
    return Bottleneck(
        "",
        f"in the last minute, a prompt waited only {format_ms(1000 * mean_s)} for its worker, on"
        " average.",
    )


def _is_recent(request: Request, now: float) -> bool:
    """Returns whether the request got its first token in the last minute."""
    ttft_ms = request["ttft_ms"]
    return ttft_ms is not None and request["created"] + ttft_ms / 1000 > now - RECENT_S


def _ready(known: Iterable[KnownWorker], role: str) -> list[KnownWorker]:
    return [
        worker
        for worker in known
        if worker.record.role == role
        and worker.record.state == "ready"
        and (role != "decode" or worker.is_up)
    ]


def _room(known: Sequence[KnownWorker]) -> str:
    """Says how many tokens the KV pools of the workers of each role can hold together. Returns ""
    if that is not known."""
    rooms = []
    for role in ("prefill", "decode"):
        workers = [worker for worker in known if worker.record.role == role]
        if tokens := _num_tokens(workers):
            on = count(len(workers), f"{role} worker")
            rooms.append(f"{tokens:,} tokens on {on}")
    return f" (total: {' and '.join(rooms)})" if rooms else ""


def _num_tokens(workers: Sequence[KnownWorker]) -> int:
    """Returns how many tokens the KV pools of the workers can hold together. Returns 0 for models
    whose layers have separate pools (sliding-window attention)."""
    loads: list[WorkerLoad] = [worker.load for worker in workers]
    if any(load.groups for load in loads):
        return 0
    return sum(w.load.blocks_total * w.record.compatibility.block_size for w in workers)
