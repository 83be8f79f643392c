"""The sequences of one decode worker, from submission to their end.

This module sends the tokens and the end of each sequence to the router that submitted the sequence.
If a sequence ends before its last token, for example because the client has gone, this module also
removes the sequence from the engine.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.engine.sequence import finish_reason
from tandem.engine.types import NewTokens
from tandem.errors import WorkerLost
from tandem.net.observability.logs import about
from tandem.net.rpc.convert import to_message
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.decode.sequence import DecodeSequence, SequenceState
from tandem.worker.engine_process.messages import Remove
from tandem.worker.kv_pulls.lease import PullStats
from tandem.worker.parts import WorkerParts

log = logging.getLogger(__name__)


class DecodeSequences:
    """All sequences of this worker. `max_model_len` is the largest number of tokens in a
    sequence.
    """

    def __init__(self, parts: WorkerParts, max_model_len: int) -> None:
        self._link = parts.link
        self._rates = parts.rates
        self._metrics = parts.metrics
        self._max_model_len = max_model_len
        self._has_tiers = parts.config.engine.has_tiers
        self._by_id: dict[str, DecodeSequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[DecodeSequence]:
        return iter(self._by_id.values())

    def get(self, sequence_id: str) -> DecodeSequence | None:
        return self._by_id.get(sequence_id)

    def find(self, stream: RouterStream, request_id: str) -> str:
        """Returns the sequence id of a request's latest attempt on a router's stream.

        For example, the id is "r7#2" for the second attempt of request "r7". Returns "" if the
        stream has no sequence of the request.
        """
        if not request_id:
            return ""
        found = [id_ for id_ in stream.sequence_ids if id_.rpartition("#")[0] == request_id]
        return max(found, key=lambda id_: int(id_.rpartition("#")[2]), default="")

    def add(self, sequence: DecodeSequence) -> None:
        self._by_id[sequence.sequence_id] = sequence
        sequence.stream.sequence_ids.add(sequence.sequence_id)

    def send_first_token(
        self, sequence: DecodeSequence, prefilled: pb.Prefilled, stats: PullStats
    ) -> None:
        """Sends a prompt's first token, which its prefill worker computed.

        The token does not depend on pulled blocks, so it is sent before the pull is confirmed.
        """
        of_prompt = stats.cached.first(sequence.spec.num_prompt_tokens)
        sequence.cached = sequence.cached.then(of_prompt)
        sequence.pulled = stats
        token_id = prefilled.first_token_id
        update = _update(
            sequence,
            token_ids=[token_id],
            prompt_logprobs=prefilled.prompt_logprobs,
            embedding=prefilled.embedding,
        )
        if prefilled.HasField("logprobs"):
            update.logprobs.append(prefilled.logprobs)
        if prefilled.HasField("cached_by_tier"):
            update.cached_by_tier.SetInParent()
        self._send_tokens(sequence, update)
        # The client has this token even if the lease fails later, so the token becomes part of the
        # sequence's input.
        sequence.spec = msgspec.structs.replace(
            sequence.spec, token_ids=[*sequence.spec.token_ids, token_id], first_token_by=0.0
        )

    def send_tokens(self, sequence: DecodeSequence, new: NewTokens) -> None:
        """Sends the tokens, at least one, that an engine step produced for the sequence."""
        update = _update(
            sequence,
            token_ids=new.token_ids,
            logprobs=(to_message(pb.LogprobEntry, one) for one in new.logprobs),
            prompt_logprobs=(to_message(pb.LogprobEntry, one) for one in new.prompt_logprobs),
            embedding=new.embedding,
            is_committed=sequence.num_sent < 2,
        )
        self._send_tokens(sequence, update)

    def send_admitted(self, sequence: DecodeSequence) -> None:
        """Reports to the router, once, that the sequence is not refused as late any more. So its
        deadline does not count any more either, for example after a failed lease."""
        if not (sequence.is_admission_sent or sequence.num_sent):
            sequence.is_admission_sent = True
            sequence.spec = msgspec.structs.replace(sequence.spec, first_token_by=0.0)
            sequence.stream.push(_update(sequence, is_admitted=True))

    def send_committed(self, sequence: DecodeSequence) -> None:
        """Reports to the router that the prompt's pulled KV is committed.

        The caller must have sent `Commit` to the engine before.
        """
        sequence.stream.push(_update(sequence, is_committed=True))

    def _send_tokens(self, sequence: DecodeSequence, update: pb.SequenceUpdate) -> None:
        if not sequence.num_sent:
            sequence.note_first_token(time.monotonic())
            update.cached_tokens = sequence.cached.total
            if self._has_tiers or update.HasField("cached_by_tier"):
                update.cached_by_tier.CopyFrom(to_message(pb.CachedTokens, sequence.cached))
            self._metrics.requests.on_first_token(sequence)
        elif sequence.num_sent == 1:
            sequence.note_second_token(time.monotonic())
        if sequence.num_sent < 2:
            update.timings.CopyFrom(sequence.timings)
        sequence.num_sent += len(update.token_ids)
        sequence.stream.push(update)

    def lose_producer(self, sequence: DecodeSequence) -> None:
        """Counts one more prefill worker that was lost while it prefilled this sequence.

        If the count reaches `losses_max`, the sequence ends with an error, because the request
        itself may crash workers.
        """
        sequence.num_lost += 1
        sequence.stream.push(_update(sequence, workers_lost=sequence.num_lost))
        if sequence.num_lost == sequence.submission.losses_max:
            message = (
                f"{sequence.num_lost} prefill workers were lost while they prefilled this request"
            )
            self.abort(sequence, WorkerLost.code, message)

    def finish_if_over(self, sequence: DecodeSequence) -> None:
        """Ends a sequence whose lease failed, if the tokens sent so far are its whole answer.

        For example, `max_tokens` is 1, and the first token was sent before the lease failed. The KV
        of the prompt is then not needed any more.
        """
        reason = finish_reason(sequence.spec, sequence.spec.token_ids, self._max_model_len)
        if sequence.num_sent and reason:
            self._link.send(Remove(sequence.sequence_id))
            self.finish(sequence, reason)

    def finish(self, sequence: DecodeSequence, reason: str, num_preemptions: int = 0) -> None:
        """Ends a sequence after its last token. `reason` is "stop" or "length"."""
        self._metrics.on_preemptions(num_preemptions)
        now = time.monotonic()
        self._rates.on_end(now)
        self._metrics.requests.on_end(sequence, now)
        if sequence.second_token_at:
            second_token_s = sequence.second_token_at - sequence.first_token_at
            self._metrics.on_second_token(sequence.timings.transport, second_token_s)
        named = about(sequence.sequence_id)
        log.debug("request %s has ended: %s", sequence.request_id, reason, extra=named)
        update = _update(
            sequence,
            finish_reason=reason,
            timings=sequence.timings,
            num_preemptions=num_preemptions,
        )
        self._forget(sequence, reason)
        sequence.stream.push(update)

    def fail(
        self, sequence: DecodeSequence, code: str, message: str, *, retry_after_s: float = 0.0
    ) -> None:
        """Ends a sequence with an error. The engine must no longer have the sequence."""
        error = pb.WorkerError(code=code, message=message, retry_after_s=retry_after_s)
        if code == "queue_full":
            error.retry_after_s = self._rates.retry_after_s
        self._forget(sequence, code)
        sequence.stream.push(_update(sequence, finish_reason="error", error=error))

    def abort(
        self, sequence: DecodeSequence, code: str, message: str, *, retry_after_s: float = 0.0
    ) -> None:
        """Ends a sequence with an error and removes it from the engine."""
        self._link.send(Remove(sequence.sequence_id))
        self.fail(sequence, code, message, retry_after_s=retry_after_s)

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence whose client no longer waits for it."""
        if (sequence := self._by_id.get(sequence_id)) is not None:
            self._forget(sequence, "cancelled")
            self._link.send(Remove(sequence_id))

    def _forget(self, sequence: DecodeSequence, outcome: str) -> None:
        sequence.to(SequenceState.ENDED)
        sequence.end_span(time.monotonic(), outcome)
        self._by_id.pop(sequence.sequence_id, None)
        sequence.stream.sequence_ids.discard(sequence.sequence_id)
        if sequence.prefilling is not None and sequence.prefilling is not asyncio.current_task():
            sequence.prefilling.cancel()


def _update(sequence: DecodeSequence, **fields: Any) -> pb.SequenceUpdate:
    submission = sequence.submission
    return pb.SequenceUpdate(request_id=submission.request_id, attempt=submission.attempt, **fields)
