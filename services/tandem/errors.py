"""All errors that cross a component boundary, as one tree of exceptions.

    error                   HTTP gRPC code            meaning
    TandemError
      BadRequest            400  INVALID_ARGUMENT     the client's input is not allowed
        ContextTooLong      400  INVALID_ARGUMENT
        NeverFits           400  INVALID_ARGUMENT     the prompt exceeds the entire KV pool
        OverKeyLimit        400  INVALID_ARGUMENT     the request exceeds a limit of the API key
        PreviousResponseNotFound  400  INVALID_ARGUMENT  the response to continue is not kept
      Unauthenticated       401  UNAUTHENTICATED      no key, or an invalid one
      Forbidden             403  PERMISSION_DENIED    the key's role does not allow the call
      ScaleRefused          403  PERMISSION_DENIED    Kubernetes refused to change the pool size
      ForeignPage           403  PERMISSION_DENIED    a browser sent the call for a foreign web page
      NotPublic             404  NOT_FOUND            the call belongs to the admin port
      ModelNotFound         404  NOT_FOUND
      KeyNotFound           404  NOT_FOUND
      WorkerNotFound        404  NOT_FOUND
      NotNow                409  FAILED_PRECONDITION  an operator's request cannot be met now
      RequestNotFound       404  NOT_FOUND            the id is unknown or no longer recorded
        ResponseNotFound    404  NOT_FOUND            the response is not kept
          ItemNotFound      404  NOT_FOUND            no kept response has the item
        FileUnknown         404  NOT_FOUND            the tenant has no such file
        BatchUnknown        404  NOT_FOUND            the tenant has no such batch
      NotServed             404  NOT_FOUND            a part of OpenAI's API that is not served
      ThreadNotFound        404  NOT_FOUND            message threads are not kept
      BodyTooLate           408  DEADLINE_EXCEEDED    the client did not send its body in time
      BodyTooLarge          413  RESOURCE_EXHAUSTED
        FileTooLarge        413  RESOURCE_EXHAUSTED
      QuotaExceeded         403  RESOURCE_EXHAUSTED   the tenant's files take too much space
      NotJson               415  INVALID_ARGUMENT     the call needs Content-Type: application/json
        UnknownCoding       415  INVALID_ARGUMENT     the body is compressed otherwise than by gzip
      QueueFull             429  RESOURCE_EXHAUSTED   a retry may help after `retry_after_s`
        Overloaded          429  RESOURCE_EXHAUSTED   the predicted TTFT is too long
        Returned            429  RESOURCE_EXHAUSTED   returned by its worker to the router; internal
      TooManyRequests       429  RESOURCE_EXHAUSTED   too many open requests of one address
      RateLimited           429  RESOURCE_EXHAUSTED   a limit of the API key is reached
      BodiesFull            503  UNAVAILABLE          too many bytes of unparsed bodies
      NoWorkers             503  UNAVAILABLE          a pool is empty
      AdapterUnavailable    503  UNAVAILABLE          a worker cannot load the request's adapter
      CompilerBusy          503  UNAVAILABLE          the request's grammar cannot be checked now
      KeysUnknown           503  UNAVAILABLE          the router could not read the API keys
      UsageUnknown          503  UNAVAILABLE          usage cannot be read without Redis
      ResponseNotDeleted    503  UNAVAILABLE          Redis is away, and still has the response
      FilesUnavailable      503  UNAVAILABLE          the file store does not answer
      TokenizerLate         503  UNAVAILABLE          the tokenizer took too long and was killed
      ScaleAway             503  UNAVAILABLE          the scaler (controller or Kubernetes) is away
      WorkerLost            503  UNAVAILABLE          the worker ended, hung or is unreachable
        WorkerLeft          503  UNAVAILABLE          the worker left in order, as announced
        LeaseLost           503  UNAVAILABLE          the pulled blocks of a lease are invalid
          ProducerSilent    503  UNAVAILABLE          no heartbeat, or the engine made no step
          BlockMismatch     503  UNAVAILABLE          a pulled block has a wrong checksum
      DeadlineExceeded      504  DEADLINE_EXCEEDED
      Incompatible          500  FAILED_PRECONDITION  two components that cannot work together
      MemoryGrown           503  UNAVAILABLE          a process ends to free memory; never sent
      ConfigError           500  FAILED_PRECONDITION  invalid settings, found at startup
        UnsupportedModel    500  FAILED_PRECONDITION
      OperateError          500  INTERNAL             an operator's command failed; never sent
      InternalError         500  INTERNAL             a bug in Tandem

The string `code` of a class does not change between versions, because it is sent between processes
and in the field `code` of HTTP errors. gRPC codes are given by name, so that this module does not
depend on gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

_BY_CODE: dict[str, type[TandemError]] = {}


class TandemError(Exception):
    """Base class of all errors. `param` names the invalid field of the request, if there is one.

    `headers` are sent with the error, as HTTP headers or as gRPC trailing metadata.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    headers: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, *, code: str, http: int = 0, grpc: str = "") -> None:
        """Registers the subclass under its `code`. An omitted HTTP status or gRPC code is that of
        the base class."""
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
        """`retry_after_s` as a whole number for the header Retry-After: at least 1, and rounded up,
        because an earlier retry would be refused."""
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


class ItemNotFound(ResponseNotFound, code="item_not_found"): ...


class FileUnknown(RequestNotFound, code="file_not_found"): ...


class BatchUnknown(RequestNotFound, code="batch_not_found"): ...


class NotServed(TandemError, code="not_served", http=404, grpc="NOT_FOUND"): ...


class ThreadNotFound(TandemError, code="thread_not_found", http=404, grpc="NOT_FOUND"): ...


class NotNow(TandemError, code="not_now", http=409, grpc="FAILED_PRECONDITION"): ...


class BodyTooLate(TandemError, code="body_too_late", http=408, grpc="DEADLINE_EXCEEDED"): ...


class BodyTooLarge(TandemError, code="body_too_large", http=413, grpc="RESOURCE_EXHAUSTED"): ...


class FileTooLarge(BodyTooLarge, code="file_too_large"): ...


class QuotaExceeded(
    TandemError, code="file_quota_exceeded", http=403, grpc="RESOURCE_EXHAUSTED"
): ...


class NotJson(TandemError, code="content_type_not_json", http=415, grpc="INVALID_ARGUMENT"): ...


class UnknownCoding(NotJson, code="content_encoding_unknown"):
    headers = MappingProxyType({"accept-encoding": "gzip"})  # RFC 9110, 12.5.3


class QueueFull(TandemError, code="queue_full", http=429, grpc="RESOURCE_EXHAUSTED"): ...


class Overloaded(QueueFull, code="overloaded"): ...


class Returned(QueueFull, code="returned"): ...


class TooManyRequests(
    TandemError, code="too_many_requests", http=429, grpc="RESOURCE_EXHAUSTED"
): ...


class RateLimited(TandemError, code="rate_limit_exceeded", http=429, grpc="RESOURCE_EXHAUSTED"):
    """A rate limit is reached. `kind` is "requests", "tokens" or "concurrent"."""

    kind: str = "requests"


class BodiesFull(TandemError, code="too_many_body_bytes", http=503, grpc="UNAVAILABLE"): ...


class NoWorkers(TandemError, code="no_workers", http=503, grpc="UNAVAILABLE"): ...


class AdapterUnavailable(TandemError, code="adapter_unavailable", http=503, grpc="UNAVAILABLE"): ...


class CompilerBusy(TandemError, code="grammar_compiler_busy", http=503, grpc="UNAVAILABLE"): ...


class KeysUnknown(TandemError, code="keys_unknown", http=503, grpc="UNAVAILABLE"): ...


class UsageUnknown(TandemError, code="usage_unknown", http=503, grpc="UNAVAILABLE"): ...


class ResponseNotDeleted(
    TandemError, code="response_not_deleted", http=503, grpc="UNAVAILABLE"
): ...


class FilesUnavailable(TandemError, code="files_unavailable", http=503, grpc="UNAVAILABLE"): ...


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
    """Rebuilds an error from the code that another process sent. An unknown code gives
    InternalError."""
    return _BY_CODE.get(code, InternalError)(message, retry_after_s=retry_after_s)
