"""Every error that leaves a part of Tandem, as one tree.

    TandemError
      BadRequest            400  INVALID_ARGUMENT     client's input; says what is allowed
        ContextTooLong      400  INVALID_ARGUMENT
        NeverFits           400  INVALID_ARGUMENT     larger than the whole KV pool
        OverKeyLimit        400  INVALID_ARGUMENT     larger than the API key allows
        PreviousResponseNotFound  400  INVALID_ARGUMENT  a response that is to be continued
      Unauthenticated       401  UNAUTHENTICATED      no key, or none that works
      Forbidden             403  PERMISSION_DENIED    the key's role does not allow the call
      ScaleRefused          403  PERMISSION_DENIED    by who owns the pools' sizes
      ForeignPage           403  PERMISSION_DENIED    a browser sent the call for a foreign web page
      NotPublic             404  NOT_FOUND            the call belongs to the admin port
      ModelNotFound         404  NOT_FOUND
      KeyNotFound           404  NOT_FOUND
      WorkerNotFound        404  NOT_FOUND
      NotNow                409  FAILED_PRECONDITION  an operator's wish that cannot be met now
      RequestNotFound       404  NOT_FOUND            unknown, or too long ago
        ResponseNotFound    404  NOT_FOUND            not kept
      ThreadNotFound        404  NOT_FOUND            no message thread is kept
      BodyTooLate           408  DEADLINE_EXCEEDED    the client did not send its body in time
      BodyTooLarge          413  RESOURCE_EXHAUSTED
      NotJson               415  INVALID_ARGUMENT     the call needs Content-Type: application/json
      QueueFull             429  RESOURCE_EXHAUSTED   retry helps, after `retry_after_s`
        Overloaded          429  RESOURCE_EXHAUSTED   its first token would come too late
        Returned            429  RESOURCE_EXHAUSTED   handed back by its worker; no client gets it
      TooManyRequests       429  RESOURCE_EXHAUSTED   of one address, that have no answer yet
      RateLimited           429  RESOURCE_EXHAUSTED   a limit of its API key is reached
      BodiesFull            503  UNAVAILABLE          too many bytes of bodies that are not parsed
      NoWorkers             503  UNAVAILABLE          a pool is empty
      AdapterUnavailable    503  UNAVAILABLE          a worker cannot load the request's adapter
      CompilerBusy          503  UNAVAILABLE          the request's grammar could not be checked now
      KeysUnknown           503  UNAVAILABLE          the router has not read the API keys
      UsageUnknown          503  UNAVAILABLE          the usage cannot be read while Redis is away
      TokenizerLate         503  UNAVAILABLE          the tokenizer took too long, and was ended
      ScaleAway             503  UNAVAILABLE          who owns the pools' sizes is away
      WorkerLost            503  UNAVAILABLE          the worker died, hung or was cut off
        WorkerLeft          503  UNAVAILABLE          it ended in order, as it had said
        LeaseLost           503  UNAVAILABLE          before `released`: the pulled is worthless
          ProducerSilent    503  UNAVAILABLE          it said nothing, or its engine made no turn
          BlockMismatch     503  UNAVAILABLE          a block's checksum is not the producer's
      DeadlineExceeded      504  DEADLINE_EXCEEDED
      Incompatible          500  FAILED_PRECONDITION  two parts that may not work together
      MemoryGrown           503  UNAVAILABLE          a process ends for its memory; never sent
      ConfigError           500  FAILED_PRECONDITION  wrong settings, found at start
        UnsupportedModel    500  FAILED_PRECONDITION
      OperateError          500  INTERNAL             an operator's command failed; never sent
      InternalError         500  INTERNAL             a bug of ours

`code` is stable: it is what travels between processes and in the `code` field of an HTTP error.
Codes of gRPC are given by name, so that this module stands on nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

_BY_CODE: dict[str, type[TandemError]] = {}


class TandemError(Exception):
    """Root of the tree. `param` names the request's field at fault, where there is one.

    `headers` go with the answer: HTTP's headers, or gRPC's trailing metadata.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, *, code: str, http: int = 0, grpc: str = "") -> None:
        """HTTP's status and gRPC's code are the parent's where none is given."""
        cls.code, _BY_CODE[code] = code, cls
        cls.http_status, cls.grpc_code = http or cls.http_status, grpc or cls.grpc_code

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def retry_after_whole_s(self) -> int | None:
        """Seconds until a retry, rounded up, at least 1: a sooner one is refused again."""
        return None if self.retry_after_s is None else max(1, math.ceil(self.retry_after_s))


class BadRequest(TandemError, code="invalid_request", http=400, grpc="INVALID_ARGUMENT"): ...


class ContextTooLong(BadRequest, code="context_length_exceeded"): ...


class NeverFits(BadRequest, code="kv_capacity_exceeded"): ...


class OverKeyLimit(BadRequest, code="key_limit_exceeded"): ...


class PreviousResponseNotFound(BadRequest, code="previous_response_not_found"): ...


class Unauthenticated(TandemError, code="invalid_api_key", http=401, grpc="UNAUTHENTICATED"): ...


class Forbidden(TandemError, code="forbidden", http=403, grpc="PERMISSION_DENIED"): ...


class ScaleRefused(TandemError, code="scale_refused", http=403, grpc="PERMISSION_DENIED"): ...


class ForeignPage(TandemError, code="foreign_page", http=403, grpc="PERMISSION_DENIED"): ...


class NotPublic(TandemError, code="not_public", http=404, grpc="NOT_FOUND"): ...


class KeyNotFound(TandemError, code="key_not_found", http=404, grpc="NOT_FOUND"): ...


class ModelNotFound(TandemError, code="model_not_found", http=404, grpc="NOT_FOUND"): ...


class WorkerNotFound(TandemError, code="worker_not_found", http=404, grpc="NOT_FOUND"): ...


class RequestNotFound(TandemError, code="request_not_found", http=404, grpc="NOT_FOUND"): ...


class ResponseNotFound(RequestNotFound, code="response_not_found"): ...


class ThreadNotFound(TandemError, code="thread_not_found", http=404, grpc="NOT_FOUND"): ...


class NotNow(TandemError, code="not_now", http=409, grpc="FAILED_PRECONDITION"): ...


class BodyTooLate(TandemError, code="body_too_late", http=408, grpc="DEADLINE_EXCEEDED"): ...


class BodyTooLarge(TandemError, code="body_too_large", http=413, grpc="RESOURCE_EXHAUSTED"): ...


class NotJson(TandemError, code="content_type_not_json", http=415, grpc="INVALID_ARGUMENT"): ...


class QueueFull(TandemError, code="queue_full", http=429, grpc="RESOURCE_EXHAUSTED"): ...


class Overloaded(QueueFull, code="overloaded"): ...


class Returned(QueueFull, code="returned"): ...


class TooManyRequests(
    TandemError, code="too_many_requests", http=429, grpc="RESOURCE_EXHAUSTED"
): ...


class RateLimited(TandemError, code="rate_limit_exceeded", http=429, grpc="RESOURCE_EXHAUSTED"):
    """A limit is reached. `kind` says which: requests, tokens or concurrent."""

    kind: str = "requests"


class BodiesFull(TandemError, code="too_many_body_bytes", http=503, grpc="UNAVAILABLE"): ...


class NoWorkers(TandemError, code="no_workers", http=503, grpc="UNAVAILABLE"): ...


class AdapterUnavailable(TandemError, code="adapter_unavailable", http=503, grpc="UNAVAILABLE"): ...


class CompilerBusy(TandemError, code="grammar_compiler_busy", http=503, grpc="UNAVAILABLE"): ...


class KeysUnknown(TandemError, code="keys_unknown", http=503, grpc="UNAVAILABLE"): ...


class UsageUnknown(TandemError, code="usage_unknown", http=503, grpc="UNAVAILABLE"): ...


class TokenizerLate(TandemError, code="tokenizer_late", http=503, grpc="UNAVAILABLE"): ...


class ScaleAway(TandemError, code="scale_away", http=503, grpc="UNAVAILABLE"): ...


class WorkerLost(TandemError, code="worker_lost", http=503, grpc="UNAVAILABLE"): ...


class WorkerLeft(WorkerLost, code="worker_left"): ...


class LeaseLost(WorkerLost, code="lease_lost"): ...


class ProducerSilent(LeaseLost, code="producer_silent"): ...


class BlockMismatch(LeaseLost, code="block_mismatch"): ...


class DeadlineExceeded(
    TandemError, code="deadline_exceeded", http=504, grpc="DEADLINE_EXCEEDED"
): ...


class Incompatible(TandemError, code="incompatible", grpc="FAILED_PRECONDITION"): ...


class MemoryGrown(TandemError, code="memory_grown", http=503, grpc="UNAVAILABLE"): ...


class ConfigError(TandemError, code="config_error", grpc="FAILED_PRECONDITION"): ...


class UnsupportedModel(ConfigError, code="unsupported_model"): ...


class OperateError(TandemError, code="operate_error"): ...


class InternalError(TandemError, code="internal_error"): ...


def from_code(code: str, message: str, *, retry_after_s: float | None = None) -> TandemError:
    """The error that `code` names, as it came from another process; InternalError if unknown."""
    return _BY_CODE.get(code, InternalError)(message, retry_after_s=retry_after_s)
