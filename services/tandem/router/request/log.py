"""Keeps facts about a router's recent requests: outcome, placement, stages, tokens, migrations.

While a request runs, the facts are read from the request's jobs on demand. When the request ends,
the facts are stored and the jobs are dropped. The log keeps the last REQUESTS_MAX requests. Each
router replica has its own log, in memory. A log contains no prompt and no generated text.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from tandem.errors import RequestNotFound, TandemError
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.delta import Usage
from tandem.router.request.early_differences import EarlyDifference
from tandem.router.request.job import Job, JobState, Routed

log = logging.getLogger(__name__)

REQUESTS_MAX = 4096
RUNNING = "running"
# Where an open request is:
#   router    no worker has it: the router tokenizes its prompt or chooses its workers
#   queued    no worker has it: it waits in the router for its turn or for a usable decode worker
#   prefill   a decode worker has it and has sent no token: it is in prefill or in that queue
#   moved     as `prefill`, after another worker has sent tokens
#   decoding  it gets tokens from its decode worker
Phase = Literal["router", "queued", "prefill", "moved", "decoding"]
_REPLY_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request. `jobs` is set only while the request runs."""

    request_id: str
    kind: str
    timeline: Timeline
    tenant: str = ""
    model: str = ""  # model name of the answer: the served model or a LoRA adapter
    client_id: str = ""  # id that the client sent with the request; not unique
    created: float = field(default_factory=time.time)  # seconds since 1970
    outcome: str = RUNNING
    error: str = ""
    num_sent: int = 0
    e2e_s: float | None = None
    jobs: list[Job] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    # How much of the request's KV was pinned after its end (keeper.py). Empty: no pin was needed.
    kept: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    priority: int = 0  # lower is earlier
    # Why the prompt could not reuse the KV of an earlier one that is nearly the same.
    early_difference: EarlyDifference | None = None

    def fail(self, error: TandemError) -> None:
        self.outcome = error.code
        self.error = error.message

    def end(self) -> None:
        self.e2e_s = time.monotonic() - self.timeline.began_s
        self.facts = self._facts()
        self.jobs = []
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.usage.input_tokens": self.facts["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": self.num_sent,
            "tandem.placement": self.facts["placement"],
            "tandem.moves": self.facts["moves"],
            "tandem.outcome": self.outcome,
        }
        if ok := self.outcome in ("stop", "length"):
            attributes["gen_ai.response.finish_reasons"] = self.outcome
        is_error = not ok and self.outcome != "cancelled"
        self.timeline.span.end(attributes, error=self.outcome if is_error else "")
        log.info(
            "request %s ended: %s, %d tokens in %.3f s",
            self.request_id,
            self.outcome,
            self.num_sent,
            self.e2e_s,
            extra={"request_id": self.request_id, "request": self.as_dict},
        )

    @property
    def phase(self) -> Phase:
        """Where this open request is. Of several completions, the one that is furthest counts."""
        phases = {_phase_of(job) for job in self.jobs}
        order: tuple[Phase, ...] = ("decoding", "moved", "prefill", "queued")
        return next((phase for phase in order if phase in phases), "router")

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens of an open request; 0 until they are known."""
        return len(self.jobs[0].request.token_ids) if self.jobs else 0

    def as_dict(self) -> dict[str, Any]:
        timeline = self.timeline
        return {
            "id": self.request_id,
            "client_request_id": self.client_id,
            "session": self.session,
            "priority": self.priority,
            "object": "request",
            "kind": self.kind,
            "created": self.created,
            "outcome": self.outcome,
            "error": self.error,
            **(self.facts or self._facts()),
            "ttft_ms": _ms(timeline.ttft_s),
            "e2e_ms": _ms(self.e2e_s),
            "stages_ms": {name: _ms(seconds) for name, seconds in timeline.stages_s.items()},
            "trace_id": timeline.span.trace_id,
            "kept": self.kept or None,
        }

    def as_brief_dict(self) -> dict[str, Any]:
        """Returns the part of `as_dict` that sums over many requests need: times and workers."""
        facts = self.facts or self._facts()
        return {
            "id": self.request_id,
            "created": self.created,
            "outcome": self.outcome,
            "decode_worker": facts["decode_worker"],
            "first_decode_worker": facts["first_decode_worker"],
            "prefill_worker": facts["prefill_worker"],
            "worker_queue_ms": facts["worker_queue_ms"],
            "prefill_queue_ms": facts["prefill_queue_ms"],
            "ttft_ms": _ms(self.timeline.ttft_s),
            "stages_ms": {name: 1000 * s for name, s in self.timeline.stages_s.items()},
        }

    def _facts(self) -> dict[str, Any]:
        """Collects the facts about the request from `jobs`.

        Pulled blocks and bytes, migrations and lost workers are sums over all jobs. The other facts
        are those of the first job. If this job moved, `decode_worker` is its last decode worker,
        and the other facts are those of the workers that made the first token, as the stages are.
        """
        job = self.jobs[0] if self.jobs else None
        progress = job.progress if job else None
        routed = job.routing.routed if job else None
        timings = progress.first_timings if progress else pb.SequenceTimings()
        usage = Usage(
            len(job.request.token_ids) if job else 0,
            self.num_sent,
            progress.cached_tokens if progress else 0,
            cached_by_tier=progress.cached_by_tier if progress else None,
            is_budget_restarted=any(job.is_budget_restarted for job in self.jobs),
        )
        return {
            "placement": routed.reason if routed else "",
            "placement_sentence": self._sentence(routed, usage),
            "decode_worker": routed.placement.decode.worker_id if routed else "",
            "first_decode_worker": progress.first_worker_id if progress else "",
            "prefill_worker": timings.prefill_worker_id,
            "transport": timings.transport,
            "worker_queue_ms": round(timings.queue_ms, 3),
            "prefill_queue_ms": round(timings.prefill_queue_ms, 3),
            "shared_wait_ms": round(timings.shared_wait_ms, 3),
            "tokens_ahead": timings.tokens_ahead,
            "local_prefill_ms": round(timings.local_prefill_ms, 3),
            "remote_prefill_ms": round(timings.remote_prefill_ms, 3),
            "tokens_proposed": sum(job.progress.timings.tokens_proposed for job in self.jobs),
            "tokens_accepted": sum(job.progress.timings.tokens_accepted for job in self.jobs),
            "speculation_saved_ms": round(
                sum(job.progress.timings.speculation_saved_ms for job in self.jobs), 3
            ),
            "blocks_pulled": sum(job.progress.timings.blocks_pulled for job in self.jobs),
            "bytes_pulled": sum(job.progress.timings.bytes_pulled for job in self.jobs),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                **usage.cached_details,
                **usage.marks,
            },
            "moves": sum(job.progress.num_migrations for job in self.jobs),
            "workers_lost": sum(job.progress.num_lost for job in self.jobs),
        }

    def _sentence(self, routed: Routed | None, usage: Usage) -> str:
        """Says in words why the workers were chosen, and what prevented the reuse of KV."""
        if routed is None:
            return ""
        difference = self.early_difference
        if difference is None or usage.cached_tokens > difference.num_equal:
            return routed.sentence
        return f"{routed.sentence} {difference.sentence}"


class RequestLog:
    """The latest requests of a router for one model."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._requests_max = requests_max
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def open(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record
        while len(self._records) > self._requests_max:
            self._records.popitem(last=False)

    def latest(self, num_max: int) -> list[RequestRecord]:
        """Returns the latest requests, newest first."""
        return list(islice(reversed(self._records.values()), num_max))

    def num_in_router(self) -> int:
        """Returns the number of open requests that no worker has."""
        running = [record for record in self._records.values() if record.outcome == RUNNING]
        return sum(record.phase in ("router", "queued") for record in running)

    def find(self, name: str, tenant: str | None = None) -> RequestRecord:
        """Finds a request by its id, by the id of its reply (`cmpl-...`) or by the client's own id.

        If a client used its own id several times, the latest request is returned. With a `tenant`,
        only requests of that tenant are found. Raises RequestNotFound.
        """
        record = self._records.get(_request_id(name))
        if record is None and (same := self.find_choices(name, tenant)):
            record = same[-1]
        if record is None or tenant not in (None, record.tenant):
            raise RequestNotFound(
                f"this router has no record of the request {name[:80]!r}. A router keeps the "
                f"records of its last {self._requests_max} requests; another router replica "
                "may have this record"
            )
        return record

    def has(self, name: str, tenant: str | None = None) -> bool:
        """Returns whether `find` or `find_choices` finds a request of this name and tenant."""
        record = self._records.get(_request_id(name))
        is_found = record is not None and tenant in (None, record.tenant)
        return is_found or bool(self.find_choices(name, tenant))

    def is_of_another(self, name: str, tenant: str | None) -> bool:
        """Returns whether the log has a request of this name that belongs to another tenant."""
        request_id = _request_id(name)
        found = self._records.get(request_id) or self._records.get(f"{request_id}-0")
        return found is not None and tenant not in (None, found.tenant)

    def find_choices(self, name: str, tenant: str | None = None) -> list[RequestRecord]:
        """Returns all requests of an HTTP body with several prompts.

        `name` is the id of the body. Example: with `name` "abc", the requests of the body have the
        ids abc-0, abc-1, and so on. `name` may also be an id that the client sent; then all
        requests with this id are returned. The list may be empty.
        """
        request_id = _request_id(name)
        return [
            record
            for id_, record in self._records.items()
            if (id_.startswith(f"{request_id}-") or (name and record.client_id == name))
            and tenant in (None, record.tenant)
        ]


def _phase_of(job: Job) -> Phase:
    attempts = job.progress.attempts
    match job.state:
        case JobState.MIGRATING if attempts:  # the draining worker still sends tokens
            return "decoding"
        case JobState.SUBMITTED if job.routing.num_submissions in attempts:
            return "decoding"
        case JobState.SUBMITTED | JobState.MIGRATING:
            return "moved" if attempts else "prefill"
        case JobState.WAITING | JobState.PENDING:
            return "queued"
        case _:
            return "router"


def _request_id(name: str) -> str:
    for prefix in _REPLY_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
