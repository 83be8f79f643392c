"""The news of a generation, as HTTP and gRPC pass it on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.router.limits.limiter import Reservation
from tandem.router.metrics.timeline import Timeline
from tandem.router.parsers.machine import CallDelta
from tandem.router.request.job import Job, Step
from tandem.router.request.text import Piece
from tandem.rpc.tandem.v1.worker_pb2 import LogprobEntry


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # of the completion's


@dataclass(frozen=True, slots=True)
class Delta:
    """The news of a generation since the delta before.

    The first comes with the first token and has the prompt's ids; the last has `finish_reason`.
    `usage` counts all up to here.
    """

    text: str
    token_ids: list[int]
    usage: Usage
    finish_reason: str = ""  # "stop", "length" or "tool_calls"
    prompt_token_ids: list[int] | None = None
    stop_reason: str | int | None = None  # with "stop": the stop string, or the client's stop token
    logprobs: list[LogprobEntry] = field(default_factory=list)  # of token_ids, if asked for
    # In the first, if asked for: of the prompt from its second token on.
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    placement: str = ""  # why it was placed where it was
    timeline: Timeline | None = None  # where its time went until now
    limit_headers: Mapping[str, str] = field(default_factory=dict)  # `x-ratelimit-*`
    reasoning: str = ""  # it comes before the text
    tool_calls: tuple[CallDelta, ...] = ()


def delta_of(
    job: Job, piece: Piece, step: Step, num_sent: int, reservation: Reservation, *, is_first: bool
) -> Delta:
    prompt_token_ids = job.request.token_ids
    return Delta(
        text=piece.text,
        token_ids=piece.token_ids,
        usage=Usage(
            len(prompt_token_ids), num_sent, job.progress.cached_tokens, piece.num_reasoning
        ),
        finish_reason=piece.finish_reason,
        prompt_token_ids=prompt_token_ids if is_first else None,
        stop_reason=piece.stop_reason,
        logprobs=step.logprobs[: len(piece.token_ids)],
        prompt_logprobs=step.prompt_logprobs,
        placement=job.routing.routed.reason if job.routing.routed else "",
        timeline=job.progress.timeline,
        limit_headers=reservation.headers,
        reasoning=piece.reasoning,
        tool_calls=piece.tool_calls,
    )
