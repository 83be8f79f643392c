"""Builds the texts that answer four questions of an operator on the operators' page. No I/O.

  slow         What is slow, and why?
  kv           How full is the KV cache?
  minute       What happened in the last minute?
  more_decode  What would one more decode worker change?

Answers about requests cover only the requests of this router. A `Request` is the dictionary that
`RequestRecord.as_dict` returns. All times are in seconds since the epoch.
"""

import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.api.admin.request_text import (
    Request,
    count,
    longest_name,
    longest_of,
    longest_stage,
    percent,
    percents,
    prefilled_at,
    took,
    waited_at,
)
from tandem.common.perf_model.rates import DEFAULT_DECODE, DecodeRate
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
class Service:
    """The latencies of the router's requests in the last minute, and the targets for them."""

    first: Latency = field(default_factory=Latency)  # times to the first token
    following: Latency = field(default_factory=Latency)  # times between tokens
    ttft_target_s: float = 2.0
    itl_target_s: float = 0.1

    @property
    def is_slow(self) -> bool:
        """True if too many first tokens were later than the target."""
        return self.first.num_late > _LATE_MAX * self.first.number


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
) -> dict[str, str]:
    """Answers all questions.

    `known` are the workers that are ready or drain, and `rows` are the rows of all workers.
    `requests` are the latest requests and the slowest one of the last minute, and `records` are the
    records of all requests that the router remembers. `moved` has the number of requests that moved
    off a worker in the last minute. `queued_s` is described at `one_more_decode`.
    """
    told = {request["id"] for request in requests}
    older = [
        record.as_brief_dict()
        for record in records
        if (ttft_s := record.timeline.ttft_s) is not None
        and record.created + ttft_s > now - RECENT_S
        and record.request_id not in told
    ]
    return {
        "slow": slow(requests, service, now, older, known),
        "kv": kv_cache(known),
        "minute": last_minute(records, events, now, moved, rows),
        "more_decode": one_more_decode(known, [*requests, *older], rows, queued_s, now),
    }


def verdict(rows: Iterable[WorkerRow], service: Service, *, is_well: bool) -> str:
    """Returns a sentence about workers that are not ready, and one about slow first tokens. Returns
    "" if there is neither.

    The page shows the sentences before the problems, or in place of "All is well".
    """
    late = _late(service) if service.is_slow else ""
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
    """Says how many first tokens were later than the target."""
    first = service.first
    return (
        f"first tokens are slow: {first.num_late} of {first.number} in the last minute took longer"
        f" than the target of {service.ttft_target_s:g} s (median {took(first.median_ms or 0.0)},"
        f" slowest {took(first.max_ms or 0.0)})."
    )


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
    recent = [r for r in requests if _is_recent(r, now)]
    no_token = [r for r in requests if r["ttft_ms"] is None and r["outcome"] == RUNNING]
    oldest_s = max((now - r["created"] for r in no_token), default=0.0)
    stuck = ""
    if oldest_s > service.ttft_target_s:
        have = "has" if len(no_token) == 1 else "have"
        stuck = f"{count(len(no_token), 'request')} {have} no token yet; the oldest has waited"
        stuck += f" {oldest_s:.0f} s.{_most_queued(known)}"
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
    at_most = f", {took(first.max_ms)} at most" if first.number > 1 else ""
    parts = [
        "" if is_slow or is_slow_itl else "Nothing stands out.",
        f"First tokens {came} {took(first.median_ms)} at the median of the last minute's"
        f" {count(first.number, 'request')}{at_most} (target: {service.ttft_target_s:g} s)."
        f" {share:.0%} of that is {longest_name(sums)}{_where(sums, (*recent, *older))}.",
        f"The slowest spent {longest_stage(slowest, requests)}." if is_slow else "",
        stuck,
    ]
    if itl_ms is not None:
        only = "only " if is_slow_itl else ""
        parts.append(f"Then a token follows {only}every {took(itl_ms)}, at the median.")
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
        f"{texts[0]} is in use by running requests, {texts[1]} holds prefixes that later requests"
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
    moved: Mapping[str, int] | None = None,
    rows: Iterable[WorkerRow] = (),
) -> str:
    """Names the workers that were lost in the last minute, counts the requests that ended, and
    names the other latest events, a line each."""
    outcomes = Counter(record.outcome for record in records if _ended_at(record) > now - RECENT_S)
    recent = [event for event in events if event.at > now - RECENT_S]
    by_id = {row.worker_id: row for row in rows}
    parts, explained = _lost(recent, moved or {}, by_id, _failed_at(records, now), now)
    ended = sum(outcomes.values())
    failed = {name: number for name, number in outcomes.items() if name not in _WELL}
    if ended:
        text = f"{count(ended, 'request')} ended"
        if failed:
            why = ", ".join(f"{number} {name}" for name, number in sorted(failed.items()))
            text += f", and {sum(failed.values())} of them failed: {why}."
        else:
            text += ", and none failed."
        parts.append(text)
    told = _told([event for event in recent if event not in explained], now)
    parts += told[:_EVENTS_MAX]
    if (more := len(told) - _EVENTS_MAX) > 0:
        parts.append(f"The list of events has {more} more.")
    return "\n".join(parts) or "Nothing: no request ended, and no worker joined or left."


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
        sentence = sentence.replace(_NAMES, ", ".join(event.about for event in found))
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
    requests: Sequence[Request] = (),
    rows: Iterable[WorkerRow] = (),
    queued_s: Mapping[str, float] | None = None,
    now: float = 0.0,
) -> str:
    """Predicts the effect of another decode worker, from the workers' measured decode rates and
    from the time for which prompts waited at workers in the last minute.

    `queued_s` has, for each role, the seconds that the queued prompts of a worker took in the last
    minute, on average (`History.queued_s`).
    """
    decode = _ready(known, "decode")
    coming = [r.worker_id for r in rows if r.pool == "decode" and r.state in _COMING]
    back = ""
    if coming:
        each = "is" if len(coming) == 1 else "are"
        back = f"{', '.join(coming)} {each} starting, which has the same effect."
    if not decode:
        return " ".join(filter(None, ["Requests would be served.", back or "None is ready now."]))
    loads = [worker.load for worker in decode]
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting for load in loads)
    room = f"Room for KV in the decode pool would grow by {1 / len(decode):.0%}"
    if tokens := _num_tokens(decode):
        grown = tokens + tokens // len(decode)
        room += f", from {tokens:,} to about {grown:,} tokens"
    if num_running or num_waiting:
        parts = [_steps(decode, num_running)]
    else:
        parts = ["The time between tokens would not change: no request is decoding now."]
    if num_waiting:
        parts.append(
            f"{count(num_waiting, 'request')} in the queues of decode workers could start."
        )
    parts.append(_prompts(decode, _ready(known, "prefill"), requests, queued_s or {}, now))
    return " ".join(filter(None, [back, *parts, f"{room}."]))


def _steps(decode: Sequence[KnownWorker], num_running: int) -> str:
    """Says how much shorter a decode step would be with one more decode worker."""
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
        return (
            "The time between tokens would hardly change: a decode step, which is a part of it, "
            f"would still take {took(then_ms)}."
        )
    return (
        f"A decode step, which is a part of the time between tokens, would take {took(then_ms)}"
        f" instead of {took(now_ms)}, because each worker would run {each_then:.1f} requests"
        f" instead of {each_now:.1f}, if the new worker has processor cores or a GPU of its own."
    )


def _step_ms(rates: Sequence[DecodeRate], num_sequences: float) -> float:
    return 1000 * statistics.mean(r.step_s + r.sequence_s * max(1.0, num_sequences) for r in rates)


def _prompts(
    decode: Sequence[KnownWorker],
    prefill: Sequence[KnownWorker],
    requests: Sequence[Request],
    queued_s: Mapping[str, float],
    now: float,
) -> str:
    """Says where prompts waited, and whether a decode worker or a prefill worker would help more.

    Decode workers compute prompts, too, if that is faster than to wait for a prefill worker. All
    figures are of the last minute: queues grow and shrink within seconds, and so would the answer.
    """
    waits_s: dict[str, list[float]] = {"prefill": [], "decode": []}
    roles = {worker.record.worker_id: worker.record.role for worker in (*prefill, *decode)}
    for request in requests:
        if _is_recent(request, now) and (role := roles.get(waited_at(request))):
            waits_s[role].append(request["stages_ms"].get("queue", 0.0) / 1000)
    of_prefill, of_decode = (queued_s.get(role, 0.0) for role in ("prefill", "decode"))
    all_s = [*waits_s["prefill"], *waits_s["decode"]]
    mean_s = statistics.mean(all_s) if all_s else 0.0
    if max(of_prefill, of_decode) >= _QUEUE_LONG_S:
        text = f"In the last minute, the queued prompts took {of_prefill:.1f} s at each prefill"
        text += f" worker and {of_decode:.1f} s at each decode worker, on average."
        is_prefill = of_prefill >= of_decode
    elif mean_s >= _QUEUE_LONG_S:
        each = {role: statistics.mean(found) if found else 0.0 for role, found in waits_s.items()}
        text = f"In the last minute, a prompt waited {each['prefill']:.1f} s for a prefill worker"
        text += (
            f" or {each['decode']:.1f} s for a decode worker; decode workers also compute prompts."
        )
        is_prefill = sum(waits_s["prefill"]) >= sum(waits_s["decode"])
    elif all_s:
        return (
            "The time to first token would hardly change: in the last minute, a prompt waited only"
            f" {took(1000 * mean_s)} for its worker, on average."
        )
    else:
        return ""
    if is_prefill:
        return (
            f"{text} The bottleneck is prefill: a prefill worker would help more than a decode "
            "worker."
        )
    share = 1 / (len(decode) + 1)
    return (
        f"{text} The bottleneck is decode: one more decode worker would take over {share:.0%} "
        "of the decode workers' prompts."
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
