"""The decode side of a request, from `submit` to its one end.

    submitted --> reserved --> pulling (a lease) --> committed --> decoding --> finished
        |            |             `--> restarted: the next candidate, or prefill here
        |            `--> prefilling here ------------------------^
        `--> failed                     cancelled, or its router's stream closed: removed any time

The engine moves a sequence; this service says where its prompt is prefilled. It emits the first
token of a pulled prompt as soon as the source names it, and every other token from step reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tandem.config import WorkerConfig
from tandem.engine.types import Failed, Mode, NewTokens, Reserved
from tandem.errors import WorkerLost
from tandem.observability.logs import about
from tandem.observability.traces import NO_SPAN, NO_TRACING, Attributes, Tracing
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.convert import sequence_spec, trace_headers
from tandem.worker.decode.prefill_planner import PrefillPlanner
from tandem.worker.decode.prompt_prefill import PromptPrefill
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.decode.sequence import DecodeSequence
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Add, Remove, Report
from tandem.worker.kv_pulls.lease import LeaseMaker, PullStats
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.peers import Peers
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_pull import PrefixPuller

log = logging.getLogger(__name__)

_ASK_POLL_S = 0.02


class DecodeService:
    """All requests of this worker as a decode worker, whichever router they came from."""

    def __init__(
        self,
        config: WorkerConfig,
        link: EngineLink,
        peers: Peers,
        metrics: WorkerMetrics,
        *,
        rates: Rates,
        prefixes: PrefixPuller,
        make_lease: LeaseMaker,
        block_bytes: int,
        max_model_len: int,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._config = config
        self._link = link
        self._metrics = metrics
        self._rates = rates
        self._prefixes = prefixes
        self.planner = PrefillPlanner(config, self._rates, block_bytes=block_bytes)
        self._prompts = PromptPrefill(
            config, link, peers, metrics, self.planner, self, prefixes, make_lease
        )
        self.identity = pb.PrefixHolder()  # this worker's id, epoch and address, once it listens
        self._max_model_len = max_model_len
        self._tracing = tracing
        self._sequences: dict[str, DecodeSequence] = {}
        self._streams: set[RouterStream] = set()
        self._draining = False

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def num_pulls(self) -> int:
        return sum(s.prefilling is not None for s in self._sequences.values())

    async def serve(
        self, commands: AsyncIterator[pb.DecodeCommand], load: pb.WorkerLoad
    ) -> AsyncIterator[pb.DecodeUpdate]:
        """One router's stream. When it closes, all its requests are removed."""
        stream = RouterStream(draining=self._draining)
        stream.push_load(load, 0)
        self._streams.add(stream)
        reading = asyncio.create_task(self._read_commands(stream, commands))
        reading.add_done_callback(stream.on_reader_done)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        finally:
            reading.cancel()
            self._streams.discard(stream)
            for sequence_id in list(stream.sequence_ids):
                self._remove(sequence_id)

    def leave_pool(self) -> None:
        """Takes nothing more. Routers are told: what is here moves where it can, else goes on."""
        self._set_draining(True)

    def join_pool(self) -> None:
        """Takes sequences, after `leave_pool`."""
        self._set_draining(False)

    def _set_draining(self, draining: bool) -> None:
        self._draining = draining
        for stream in self._streams:
            stream.tell_draining(draining)

    async def ask_nobody(self, grace_s: float) -> None:
        """Returns when no prompt of a sequence here waits for a prefill worker.

        Those that are asked already have so long to answer; what is missing then is computed here.
        """
        loop = asyncio.get_running_loop()
        for sequence in self._sequences.values():
            sequence.may_ask = False
        give_up_at = loop.time() + grace_s
        while asking := [s.asks for s in self._sequences.values() if s.asks is not None]:
            if loop.time() >= give_up_at:
                for ending in asking:
                    if ending.when() is None:
                        ending.reschedule(give_up_at)
            await asyncio.sleep(_ASK_POLL_S)

    def end_streams(self) -> None:
        """The worker leaves: routers see their streams end, not break."""
        for stream in self._streams:
            stream.end()

    def on_report(self, report: Report, load: pb.WorkerLoad) -> None:
        """Hands on what a step brought; one message to each router concerned."""
        step = report.report
        self.planner.load = load
        for admitted in step.admitted:
            if (sequence := self._sequences.get(admitted.sequence_id)) is not None:
                sequence.admitted_at = sequence.admitted_at or admitted.at
        for reserved in step.reserved:
            self._on_reserved(reserved)
        for new_tokens in step.new_tokens:
            self._on_new_tokens(new_tokens)
        for failed in step.failed:
            self._on_failed(failed)
        for stream in self._streams:
            stream.push_load(load, report.num_commands)

    async def _read_commands(
        self, stream: RouterStream, commands: AsyncIterator[pb.DecodeCommand]
    ) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    self._submit(stream, command.submit)
                    stream.note_submit(self._link.num_sent)
                case "cancel":
                    for sequence_id in list(stream.sequence_ids):
                        if sequence_id.rpartition("#")[0] == command.cancel.request_id:
                            self._remove(sequence_id)

    def _submit(self, stream: RouterStream, submit: pb.SubmitSequence) -> None:
        sequence_id = f"{submit.request_id}#{submit.attempt}"
        transfer = self._config.transfer
        candidates = [c for c in submit.prefill_candidates if c.worker_id != self._config.worker_id]
        if transfer.prefill_at == "local":
            candidates = []
        spec = sequence_spec(
            submit.input,
            sequence_id=sequence_id,
            mode=Mode.AWAIT_KV if candidates else Mode.HERE,
            remote_prefill_min_tokens=transfer.local_prefill_max_tokens + 1,
        )
        holders = [h for h in submit.prefix_holders if h.worker_id != self._config.worker_id]
        span = NO_SPAN
        if submit.HasField("trace"):
            attributes: Attributes = {
                "gen_ai.response.id": submit.request_id,
                "tandem.attempt": submit.attempt,
            }
            span = self._tracing.begin("decode_worker", trace_headers(submit.trace), attributes)
        sequence = DecodeSequence(
            submit.request_id, submit.attempt, spec, candidates, holders, stream, span=span
        )
        sequence.losses_max = submit.losses_max
        if not candidates and (prefix := self._prefixes.plan(spec, holders)) is not None:
            sequence.prefix, sequence.spec = prefix, prefix.spec
        self._sequences[sequence_id] = sequence
        stream.sequence_ids.add(sequence_id)
        if self._draining:
            self._end_with_error(sequence, "no_workers", "this worker is draining")
            return
        self._link.send(Add(sequence.spec))

    def _on_reserved(self, reserved: Reserved) -> None:
        sequence = self._sequences.get(reserved.sequence_id)
        if sequence is None:
            return
        if sequence.reserved is not None and not sequence.reserved.done():
            sequence.reserved.set_result(reserved)
            return
        sequence.cached_tokens = min(reserved.num_cached_tokens, sequence.spec.num_prompt_tokens)
        sequence.prefilling = asyncio.create_task(self._prompts.run(sequence, reserved))
        sequence.prefilling.add_done_callback(lambda task: self._prefill_ended(sequence, task))

    def as_holder(self, num_blocks: int) -> list[pb.PrefixHolder]:
        """This worker as one that has so many first blocks of a prompt."""
        if not (num_blocks and self.identity.address):
            return []
        holder = pb.PrefixHolder(num_blocks=num_blocks)
        holder.MergeFrom(self.identity)
        return [holder]

    def on_first_token(self, sequence: DecodeSequence, token_id: int, stats: PullStats) -> None:
        """It depends on no block that was pulled, so it leaves before they are trusted."""
        sequence.cached_tokens = max(
            sequence.cached_tokens, min(stats.cached_tokens, sequence.spec.num_prompt_tokens)
        )
        sequence.pulled = stats
        self._send_tokens(sequence, [token_id])
        # Whatever happens to the lease now, the client has this token: it is part of the input.
        sequence.spec = msgspec.structs.replace(
            sequence.spec, token_ids=[*sequence.spec.token_ids, token_id]
        )

    def on_source_lost(self, sequence: DecodeSequence) -> bool:
        """Its router counts who was lost under the request: one that crashes workers must end."""
        sequence.num_lost += 1
        sequence.stream.push(self._update(sequence, workers_lost=sequence.num_lost))
        if sequence.num_lost != sequence.losses_max:
            return True
        self._link.send(Remove(sequence.sequence_id))
        message = f"{sequence.num_lost} prefill workers were lost under it here"
        self._end_with_error(sequence, WorkerLost.code, message)
        return False

    def finish_if_over(self, sequence: DecodeSequence) -> bool:
        """Ends a sequence whose lease failed after its last token was sent."""
        spec = sequence.spec
        if not sequence.num_sent:
            return False
        made = len(spec.token_ids) - spec.num_prompt_tokens
        if spec.token_ids[-1] in spec.stop_token_ids:
            reason = "stop"
        elif made >= spec.max_tokens or len(spec.token_ids) >= self._max_model_len:
            reason = "length"
        else:
            return False
        self._link.send(Remove(sequence.sequence_id))
        self._end(sequence, finish_reason=reason, num_preemptions=0)
        return True

    def _prefill_ended(self, sequence: DecodeSequence, task: asyncio.Task[None]) -> None:
        sequence.prefilling = None
        if self.is_over(sequence) or not (task.cancelled() or task.exception()):
            return
        error = "cancelled" if task.cancelled() else repr(task.exception())
        named = about(sequence.sequence_id)
        log.error("prefill of %s broke: %s", sequence.request_id, error, extra=named)
        self._link.send(Remove(sequence.sequence_id))
        self._end_with_error(sequence, "internal_error", f"its prefill broke: {error}")

    def _on_new_tokens(self, new: NewTokens) -> None:
        sequence = self._sequences.get(new.sequence_id)
        if sequence is None:
            return
        if new.token_ids:
            if not sequence.num_sent:
                sequence.cached_tokens = max(sequence.cached_tokens, new.num_cached_tokens)
            self._send_tokens(sequence, new.token_ids)
        if new.finish_reason:
            self._end(
                sequence, finish_reason=new.finish_reason, num_preemptions=new.num_preemptions
            )

    def _on_failed(self, failed: Failed) -> None:
        sequence = self._sequences.get(failed.sequence_id)
        if sequence is not None:
            self._link.send(Remove(failed.sequence_id))  # the engine may hold it, or know it not
            self._end_with_error(sequence, failed.code, failed.message)

    def _send_tokens(self, sequence: DecodeSequence, token_ids: list[int]) -> None:
        update = self._update(sequence, token_ids=token_ids)
        if not sequence.num_sent:
            sequence.note_first_token(time.monotonic())
            update.cached_tokens = sequence.cached_tokens
            self._metrics.requests.on_first_token(sequence)
        elif sequence.num_sent == 1:
            sequence.note_second_token(time.monotonic())
        if sequence.num_sent < 2:
            update.timings.CopyFrom(sequence.timings)
        sequence.num_sent += len(token_ids)
        sequence.stream.push(update)

    def _end(self, sequence: DecodeSequence, *, finish_reason: str, num_preemptions: int) -> None:
        self._metrics.preemptions.inc(num_preemptions)
        now = time.monotonic()
        self._rates.on_end(now)
        self._metrics.requests.on_end(sequence, now)
        if sequence.second_token_at:
            second_token_s = sequence.second_token_at - sequence.first_token_at
            self._metrics.on_second_token(sequence.timings.transport, second_token_s)
        sequence.end_span(now, finish_reason)
        named = about(sequence.sequence_id)
        log.debug("%s ended here: %s", sequence.request_id, finish_reason, extra=named)
        update = self._update(
            sequence,
            finish_reason=finish_reason,
            timings=sequence.timings,
            num_preemptions=num_preemptions,
        )
        self._forget(sequence)
        sequence.stream.push(update)

    def _end_with_error(self, sequence: DecodeSequence, code: str, message: str) -> None:
        error = pb.WorkerError(code=code, message=message)
        if code == "queue_full":
            error.retry_after_s = self._rates.retry_after_s
        sequence.end_span(time.monotonic(), code)
        self._forget(sequence)
        sequence.stream.push(self._update(sequence, finish_reason="error", error=error))

    def _update(self, sequence: DecodeSequence, **fields: Any) -> pb.SequenceUpdate:
        return pb.SequenceUpdate(request_id=sequence.request_id, attempt=sequence.attempt, **fields)

    def _remove(self, sequence_id: str) -> None:
        """Nobody waits for it any more."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.end_span(time.monotonic(), "cancelled")
            self._forget(sequence)
            self._link.send(Remove(sequence_id))

    def is_over(self, sequence: DecodeSequence) -> bool:
        return self._sequences.get(sequence.sequence_id) is not sequence

    def _forget(self, sequence: DecodeSequence) -> None:
        self._sequences.pop(sequence.sequence_id, None)
        sequence.stream.sequence_ids.discard(sequence.sequence_id)
        if sequence.prefilling is not None and sequence.prefilling is not asyncio.current_task():
            sequence.prefilling.cancel()
