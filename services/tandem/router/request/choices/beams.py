"""Beam search as defined by vLLM 0.11's OpenAI server (`use_beam_search`).

`width` beams begin as one, the prompt. Each step takes the 2 x `width` most likely next tokens of
each beam, by the model's own log probabilities:
- An end token completes the beam with its log probability. The completed beam does not count
towards the `width` others. With `ignore_eos` an end token is an ordinary token.
- The `width` other candidates with the highest cumulative log probability continue.
After `max_tokens` steps, the completed and the running beams are ranked by
    cumulative log probability / (number of tokens ** length penalty)
where the tokens are those of the prompt and the completion, without a final end token. The answer
is the `width` best. Among equal beams the earlier one comes first, and then the more likely token.
vLLM uses one end token; here each end token of the model completes a beam. As in vLLM, temperature,
filters and seed have no effect.
Each token of a beam is a job of its own with one token. It is placed on the worker of the previous
job, which has its blocks cached. A lost or refused job is submitted again like any other, with the
same result.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.choices.interleave import interleave
from tandem.router.request.job import Job, JobStep, PreparedRequest, Progress


@dataclass(frozen=True, slots=True)
class BeamOptions:
    width: int
    length_penalty: float
    end_token_ids: Collection[int]
    ignores_end: bool


@dataclass(frozen=True, slots=True)
class Beam:
    """A completion so far. `source` is the index of the beam that its last token extended."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # sum over all its tokens
    source: int = 0
    is_ended: bool = False


async def search(
    job: Job, options: BeamOptions, run: Callable[[Job], AsyncGenerator[JobStep, None]]
) -> list[Beam]:
    """Returns the best beams, best first.

    `job` is prepared for all tokens; `run` runs a job to its end. The first step is `job` itself,
    so its timings are those of the request.
    """
    num_steps = job.request.max_tokens
    job.request = _with_max_tokens(job.request, 1)
    running = [Beam()]
    completed = list[Beam]()
    jobs = [job]
    numbers = count(1)
    for _ in range(num_steps):
        found = await _next_tokens(jobs, run)
        running, ended = extend(running, found, options)
        completed += ended
        jobs = [_job(beam, jobs[beam.source], next(numbers)) for beam in running]
    return ranked([*completed, *running], len(job.request.token_ids), options)


def extend(
    beams: Sequence[Beam], found: Sequence[LogprobEntry], options: BeamOptions
) -> tuple[list[Beam], list[Beam]]:
    """Returns the beams that continue and those that end, given the most likely next tokens."""
    candidates = [
        Beam(
            (*beam.token_ids, token_id),
            beam.logprob + logprob,
            source,
            is_ended=not options.ignores_end and token_id in options.end_token_ids,
        )
        for source, (beam, entry) in enumerate(zip(beams, found, strict=True))
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]
    going_on = [beam for beam in candidates if not beam.is_ended]
    going_on.sort(key=lambda beam: beam.logprob, reverse=True)  # sort() is stable
    return going_on[: options.width], [beam for beam in candidates if beam.is_ended]


def ranked(beams: Sequence[Beam], num_prompt_tokens: int, options: BeamOptions) -> list[Beam]:
    """Returns the best of all beams, best first."""

    def score(beam: Beam) -> float:
        ends = bool(beam.token_ids) and beam.token_ids[-1] in options.end_token_ids
        num_tokens = num_prompt_tokens + len(beam.token_ids) - ends
        return float(beam.logprob / num_tokens**options.length_penalty)

    return sorted(beams, key=score, reverse=True)[: options.width]


async def _next_tokens(
    jobs: Sequence[Job], run: Callable[[Job], AsyncGenerator[JobStep, None]]
) -> list[LogprobEntry]:
    """Runs all jobs to their end; returns the most likely next tokens of each."""
    found: dict[int, LogprobEntry] = {}
    async with aclosing(interleave([run(job) for job in jobs])) as steps:
        async for index, step in steps:
            if step.logprobs:
                found[index] = step.logprobs[0]
    for job in jobs:
        job.parent = None  # otherwise each step would keep all earlier ones in memory
    return [found[index] for index in range(len(jobs))]


def _job(beam: Beam, source: Job, index: int) -> Job:
    """Returns the job for the next token of a beam. `source` is the job of its last token."""
    request = _with_max_tokens(source.request, len(beam.token_ids) + 1)
    progress = Progress(
        list(source.progress.block_hashes),
        Timeline(),
        list(beam.token_ids),
        # counted over all steps, so that a beam that crashes workers ends
        num_lost=source.progress.num_lost,
    )
    return Job(request, progress, index=index, parent=source)


def _with_max_tokens(request: PreparedRequest, max_tokens: int) -> PreparedRequest:
    sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
    return replace(request, sampling=sampling)
