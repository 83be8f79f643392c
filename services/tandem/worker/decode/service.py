"""The decode service of a worker: routers' streams and the engine's reports on their sequences.

The engine's reports change the states of sequences, which sequence.py describes. prompt_prefill.py
decides where a prompt is prefilled, and live_sequences.py sends updates to the router. If another
worker prefills a prompt, the first token is sent as soon as that worker returns it. Every other
token is sent when the engine reports the step that computed it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from tandem.common.worker_load import WorkerLoad
from tandem.engine.types import Mode, NewTokens, Reserved
from tandem.net.observability.logs import about
from tandem.net.observability.traces import NO_SPAN, Attributes
from tandem.net.rpc.convert import to_message, trace_headers
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.convert import sequence_spec
from tandem.worker.decode.live_sequences import DecodeSequences
from tandem.worker.decode.prefill_planner import PrefillPlanner
from tandem.worker.decode.prompt_prefill import Producers, PromptPrefill
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.decode.sequence import DecodeSequence, SequenceState, Submission
from tandem.worker.engine_process.messages import Add, Report, ReturnWaiting
from tandem.worker.parts import WorkerParts

log = logging.getLogger(__name__)

_POLL_S = 0.02


class DecodeService:
    """Serves the sequences of all routers on this worker, in its role as a decode worker."""

    def __init__(
        self,
        parts: WorkerParts,
        producers: Producers,
        identity: pb.PrefixHolder,
        max_model_len: int,
    ) -> None:
        """`identity` is this worker's id, epoch and address."""
        self._config = parts.config
        self._link = parts.link
        self._tracing = parts.tracing
        self._prefixes = producers.prefixes
        self.planner = PrefillPlanner(parts.config, parts.rates)
        self._sequences = DecodeSequences(parts, max_model_len)
        self._prompts = PromptPrefill(parts, producers, self.planner, self._sequences, identity)
        self._streams: set[RouterStream] = set()
        self._draining = False

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Iterable[DecodeSequence]:
        """All sequences on this worker."""
        return self._sequences

    async def serve(
        self, commands: AsyncIterator[pb.DecodeCommand], load: WorkerLoad
    ) -> AsyncIterator[pb.DecodeUpdate]:
        """Serves one router's stream. When the stream closes, the router's requests are removed."""
        stream = RouterStream(draining=self._draining)
        stream.push_load(to_message(pb.WorkerLoad, load), 0)
        self._streams.add(stream)
        reading = asyncio.create_task(self._read_commands(stream, commands))
        reading.add_done_callback(stream.on_consumer_done)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        finally:
            reading.cancel()
            self._streams.discard(stream)
            for sequence_id in list(stream.sequence_ids):
                self._sequences.remove(sequence_id)

    def leave_pool(self) -> None:
        """Accepts no more sequences. Routers are informed and may migrate running sequences."""
        self._set_draining(True)

    def join_pool(self) -> None:
        """Accepts sequences again after `leave_pool`."""
        self._set_draining(False)

    def _set_draining(self, draining: bool) -> None:
        self._draining = draining
        for stream in self._streams:
            stream.set_draining(draining)

    async def stop_remote_prefills(self, grace_s: float) -> None:
        """Stops remote prefill and returns when no sequence waits for a prefill worker.

        Running remote prefills get `grace_s` seconds to finish; after that, missing tokens are
        computed locally.
        """
        loop = asyncio.get_running_loop()
        for sequence in self._sequences:
            sequence.may_prefill_remotely = False
        give_up_at = loop.time() + grace_s
        while running := [t for s in self._sequences if (t := s.remote_prefill) is not None]:
            if loop.time() >= give_up_at:
                for timeout in running:
                    if timeout.when() is None:
                        timeout.reschedule(give_up_at)
            await asyncio.sleep(_POLL_S)

    def end_streams(self) -> None:
        """Ends the streams of all routers once their queued updates were sent."""
        for stream in self._streams:
            stream.end()

    def on_report(self, report: Report, load: WorkerLoad) -> None:
        """Applies the results of an engine step.

        Each router gets one message, with the updates of its own sequences and this worker's load.
        """
        step = report.step
        self.planner.take_load(load, report.num_commands)
        reserved_ids = {reserved.sequence_id for reserved in step.reserved}
        for admitted in step.admitted:
            if (sequence := self._sequences.get(admitted.sequence_id)) is not None:
                # The prefill worker may still refuse a prompt with a deadline.
                if not (sequence.spec.first_token_by and sequence.sequence_id in reserved_ids):
                    self._sequences.send_admitted(sequence)
                sequence.admitted_at = sequence.admitted_at or admitted.at
                sequence.shared_wait_s = admitted.shared_wait_s
                sequence.tokens_ahead = admitted.tokens_ahead
        for reserved in step.reserved:
            self._on_reserved(reserved)
        for new_tokens in step.new_tokens:
            self._on_new_tokens(new_tokens)
        for failed in step.failed:
            if (sequence := self._sequences.get(failed.sequence_id)) is not None:
                after_s = failed.retry_after_s
                self._sequences.abort(sequence, failed.code, failed.message, retry_after_s=after_s)
        if self._streams:
            message = to_message(pb.WorkerLoad, load)
            for stream in self._streams:
                stream.push_load(message, report.num_commands)

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
                            self._sequences.remove(sequence_id)
                case "return_waiting":
                    self._return_waiting(stream, command.return_waiting.count)

    def _return_waiting(self, stream: RouterStream, count: int) -> None:
        """Takes at most `count` of a router's waiting sequences from the engine's queue.

        The router can then place these sequences on other workers.
        """
        found = [s for id_ in stream.sequence_ids if (s := self._sequences.get(id_)) is not None]
        queued = [
            s.sequence_id
            for s in found
            if s.submission.may_return and s.state is SequenceState.QUEUED and not s.admitted_at
        ]
        if queued:
            self._link.send(ReturnWaiting(queued, count))

    def _submit(self, stream: RouterStream, submit: pb.SubmitSequence) -> None:
        sequence_id = f"{submit.request_id}#{submit.attempt}"
        transfer = self._config.transfer
        candidates = [c for c in submit.prefill_candidates if c.worker_id != self._config.worker_id]
        if transfer.prefill_at == "local":
            candidates = []
        local_tokens_max = transfer.local_prefill_max_tokens
        # `fork_of` is an earlier request with the same prompt that was sent to this worker. So all
        # full blocks of the prompt are probably cached here. At most one block of tokens, or the
        # tokens after the last frozen state, are then missing, and local prefill is fastest.
        if submit.fork_of:
            local_tokens_max = max(local_tokens_max, self._prefixes.depth_step_tokens)
        spec = sequence_spec(
            submit.input,
            sequence_id=sequence_id,
            mode=Mode.WAITING_FOR_REMOTE_KV if candidates else Mode.LOCAL,
            remote_prefill_min_tokens=local_tokens_max + 1,
            fork_of=self._sequences.find(stream, submit.fork_of),
            first_token_s=submit.first_token_s,
            late_s=stream.transit.late_s(submit.sent_at_s),
        )
        others = (h for h in submit.prefix_holders if h.worker_id != self._config.worker_id)
        holders = self.planner.alive(self._prefixes.resumable(others, len(spec.token_ids)))
        span = NO_SPAN
        if submit.HasField("trace"):
            attributes: Attributes = {
                "gen_ai.response.id": submit.request_id,
                "tandem.attempt": submit.attempt,
            }
            span = self._tracing.begin("decode_worker", trace_headers(submit.trace), attributes)
        submission = Submission(
            submit.request_id,
            submit.attempt,
            candidates,
            holders,
            submit.losses_max,
            submit.may_return,
        )
        sequence = DecodeSequence(submission, spec, stream, span)
        if candidates:
            sequence.spec = self._prompts.compared(spec, candidates, holders)
        elif (prefix := self._prefixes.plan(spec, holders)) is not None:
            sequence.prefix = prefix
            sequence.spec = prefix.spec
        self._sequences.add(sequence)
        if self._draining:
            self._sequences.fail(sequence, "no_workers", "this worker is draining")
            return
        self._link.send(Add(sequence.spec))

    def _on_reserved(self, reserved: Reserved) -> None:
        sequence = self._sequences.get(reserved.sequence_id)
        if sequence is None:
            return
        sequence.to(SequenceState.RESERVED)
        if sequence.reserved is not None and not sequence.reserved.done():
            sequence.reserved.set_result(reserved)
            return
        sequence.note_cached(reserved)
        sequence.prefilling = asyncio.create_task(self._prompts.run(sequence, reserved))
        sequence.prefilling.add_done_callback(lambda task: self._prefill_ended(sequence, task))

    def _prefill_ended(self, sequence: DecodeSequence, task: asyncio.Task[None]) -> None:
        if sequence.prefilling is task:  # A newer prefill task may have replaced this one.
            sequence.prefilling = None
        if sequence.is_over or not (task.cancelled() or task.exception()):
            return
        error = "cancelled" if task.cancelled() else repr(task.exception())
        named = about(sequence.sequence_id)
        log.error(
            "prefill of request %s failed unexpectedly: %s", sequence.request_id, error, extra=named
        )
        self._sequences.abort(sequence, "internal_error", f"the prefill failed: {error}")

    def _on_new_tokens(self, new: NewTokens) -> None:
        sequence = self._sequences.get(new.sequence_id)
        if sequence is None:
            return
        if sequence.state is SequenceState.QUEUED:
            sequence.to(SequenceState.RUNNING)
        if new.token_ids:
            if not sequence.num_sent:
                sequence.cached = sequence.cached.then(new.cached)
            self._sequences.send_tokens(sequence, new)
        if new.finish_reason:
            if new.speculated is not None:
                sequence.note_speculated(new.speculated)
            self._sequences.finish(sequence, new.finish_reason, new.num_preemptions)
