"""Runs one admitted request: turns the tokens of its jobs into deltas, and counts the tokens.

Each choice gets its tokens from one job (children.py). The request ends when all choices have
ended. The last delta of the request has the usage of all choices (`total`). Before the last delta
is sent, the tokens that the request reserved but did not use are given back to its tenant's limits.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.errors import DeadlineExceeded
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.limits.limiter import LimitReservation
from tandem.router.limits.meter import TenantMeter
from tandem.router.metrics.router import Metrics
from tandem.router.request.delta import Delta, Usage
from tandem.router.request.dispatcher import Dispatcher
from tandem.router.request.job import Job, JobState, JobStep
from tandem.router.request.keeper import Keeper
from tandem.router.request.log import RequestRecord
from tandem.router.request.text import Piece, TextStream


@dataclass(slots=True)
class Choice:
    """One completion, with the job that generates its tokens and the stream of its text."""

    index: int
    job: Job
    text: TextStream
    num_sent: int = 0  # number of tokens sent so far
    is_begun: bool = False
    has_calls: bool = False  # True: the text has at least one tool call


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that all requests of a router share."""

    dispatcher: Dispatcher
    metrics: Metrics
    tenants: TenantMeter
    slo: AutoscaleConfig
    keeper: Keeper
    deadline_s: float  # a request fails if it takes longer than this many seconds


class Generation:
    """Generates the completions of one prompt.

    `record.jobs` has one job for each completion. `deadline` is a time on the event loop's clock.
    """

    def __init__(
        self,
        services: Services,
        record: RequestRecord,
        reservation: LimitReservation,
        *,
        num_choices: int,
        deadline: float,
    ) -> None:
        self._services = services
        self._record = record
        self._reservation = reservation
        self._first = record.jobs[0]
        self._num_open = num_choices
        self._num_generated = 0  # number of generated tokens, discarded beams included
        self._num_reasoning = 0  # reasoning tokens of the choices that have ended
        self._deadline = deadline
        self._is_batch = self._first.request.client.is_batch

    async def follow(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of a choice until it ends."""
        async with aclosing(self.steps(choice.job)) as steps:
            async for step in steps:
                # A worker generates at least one token. If max_tokens is 0, that token is dropped.
                if choice.job.request.client.sampling.max_tokens == 0:
                    piece = choice.text.push([], "length")
                else:
                    piece = choice.text.push(step.token_ids, step.finish_reason)
                self._note(choice, len(piece.token_ids))
                choice.has_calls |= bool(piece.tool_calls)
                if piece.finish_reason:
                    # Close the job before yielding the last delta, because the client may read the
                    # delta late. So the worker is free, and the tenant's limits are up to date,
                    # before the client can send the next request.
                    await steps.aclose()
                    waits_for_tools = choice.has_calls and piece.finish_reason != "length"
                    self._services.keeper.on_end(choice.job, self._record, waits_for_tools)
                yield self._delta(choice, piece, step.logprobs)
                if piece.finish_reason:
                    return

    def whole(self, choice: Choice, token_ids: list[int], finish_reason: str) -> Delta:
        """Returns one delta with the whole text of a choice. `token_ids` are all of its tokens."""
        piece = choice.text.push(token_ids, finish_reason)
        self._note(choice, len(piece.token_ids))
        return self._delta(choice, piece, [])

    async def steps(self, job: Job) -> AsyncGenerator[JobStep, None]:
        """Yields the steps of a job. Raises DeadlineExceeded at the request's deadline."""
        async with aclosing(self._services.dispatcher.run(job)) as steps:
            while True:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        step = await anext(steps)
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the request took longer than {self._services.deadline_s:g} s"
                    ) from None
                except StopAsyncIteration:
                    return
                self._num_generated += len(step.token_ids)
                yield step

    def _delta(self, choice: Choice, piece: Piece, logprobs: list[LogprobEntry]) -> Delta:
        """Returns the delta for a new piece of text.

        The method settles the request's reservation before it returns the request's last delta.
        """
        job = choice.job
        record = self._record
        first = self._first
        num_tokens = len(piece.token_ids)
        choice.num_sent += num_tokens
        record.num_sent += num_tokens
        self._services.metrics.generation_tokens.inc(num_tokens)
        cached_tokens = first.progress.cached_tokens
        by_tier = first.progress.cached_by_tier
        prompt_token_ids = first.request.token_ids
        storable = first.request.storable_tokens
        total = None
        if piece.finish_reason:
            self._num_open -= 1
            self._num_reasoning += piece.num_reasoning
            if not self._num_open:
                self.settle()
                if not self._is_batch:
                    num_tokens = max(self._num_generated, self._record.num_sent)
                    self._services.metrics.demand.ended(num_tokens)
                total = Usage(
                    len(prompt_token_ids),
                    record.num_sent,
                    cached_tokens,
                    self._num_reasoning,
                    by_tier,
                    storable,
                    any(job.is_budget_restarted for job in record.jobs),
                )
        is_first = not choice.is_begun
        choice.is_begun = True
        return Delta(
            text=piece.text,
            token_ids=piece.token_ids,
            usage=Usage(
                len(prompt_token_ids),
                choice.num_sent,
                cached_tokens,
                piece.num_reasoning,
                by_tier,
                storable,
                job.is_budget_restarted,
            ),
            finish_reason=piece.finish_reason,
            prompt_token_ids=prompt_token_ids if is_first else None,
            stop_reason=piece.stop_reason,
            logprobs=logprobs[: len(piece.token_ids)],
            prompt_logprobs=first.progress.prompt_logprobs if is_first else [],
            embedding=first.progress.embedding if is_first else [],
            routed=job.routing.routed,
            timeline=record.timeline,
            limit_headers=self._reservation.headers,
            reasoning=piece.reasoning,
            tool_calls=piece.tool_calls,
            index=choice.index,
            total=total,
        )

    def settle(self) -> None:
        """Counts the tokens that the request used, and gives back the unused reserved tokens.

        If no worker ran the request, this method does nothing: `TenantMeter.reserved` gives back
        the whole reservation. Further calls have no effect.
        """
        client = self._first.request.client
        num_sent = self._record.num_sent
        if any(_took(job) for job in self._record.jobs):
            self._services.tenants.settle(
                self._reservation,
                client.tenant,
                prompt=len(self._first.request.token_ids),
                cached=self._first.progress.cached_tokens,
                # With beam search, the tokens of discarded beams count, too.
                completion=self._num_generated if client.use_beam_search else num_sent,
            )

    def _note(self, choice: Choice, num_tokens: int) -> None:
        """Records the latency of new tokens in the metrics.

        The request's TTFT is that of choice 0. Each token after the first of any choice has an
        inter-token latency (ITL). The autoscaler gets both latencies as multiples of their SLO
        limits: with an ITL limit of 50 ms, an ITL of 75 ms counts as 1.5.
        """
        if not num_tokens:
            return
        now = time.monotonic()
        timeline = choice.job.progress.timeline
        elapsed_s = now - timeline.last_token_s
        slo = self._services.slo
        metrics = self._services.metrics
        timeline.note_tokens(now, num_tokens)
        if self._is_batch:
            return  # nobody waits for a token of a batch, so its latencies say nothing
        if choice.num_sent:
            metrics.on_next_tokens(elapsed_s / num_tokens, slo.itl_s, num_tokens)
        elif not choice.index:
            allowed_s = slo.ttft_s + slo.ttft_token_s * len(choice.job.request.token_ids)
            metrics.on_first_token(elapsed_s, allowed_s)


def _took(job: Job) -> bool:
    was_left = job.state is JobState.CANCELLED and job.routing.num_submissions > 0
    return bool(job.progress.output_token_ids) or job.state is JobState.ENDED or was_left
