"""Failures of a call as its gRPC status: what callers act on, without a traceback in the log."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import BadRequest, DeadlineExceeded, TandemError


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends the call with the error's code and message; trailers say when to come again."""
    trailers: tuple[tuple[str, str], ...] = (("tandem-code", error.code), *error.headers.items())
    if error.retry_after_s is not None:
        after_s = error.retry_after_whole_s
        # The second is what gRPC's own retry policies heed (gRFC A6).
        trailers += (("retry-after", f"{after_s}"), ("grpc-retry-pushback-ms", f"{after_s}000"))
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), error.message, trailers)
    raise AssertionError("abort raises")


class FailureInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a unary call by the TandemError or TimeoutError that it raises; streams say theirs in
    their events.

    It also parses the message of a unary call. gRPC would answer bytes that are no message with
    UNKNOWN, and log a traceback, before any code of ours ran.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        serve, method = handler.unary_unary, handler_call_details.method
        parse = handler.request_deserializer

        async def answer(body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await serve(_parsed(parse, body, method) if parse else body, context)
            except TandemError as error:
                await abort(context, error)
            except TimeoutError:
                await abort(context, DeadlineExceeded(f"no answer in time to {method}"))

        return grpc.unary_unary_rpc_method_handler(
            answer, response_serializer=handler.response_serializer
        )


def _parsed(parse: Callable[[bytes], Any], body: bytes, method: str) -> Any:
    try:
        return parse(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"{method} takes a valid message whose strings are UTF-8: {error}"
        ) from None


def _calm(record: logging.LogRecord) -> bool:
    """A send that failed because the peer's connection is gone is no error of the server's, and
    neither is a malformed message to a stream of gRPC's own services."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, grpc.aio.InternalError | DecodeError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info = None
    return True


def log_lost_peers_calmly() -> None:
    """Keeps gRPC from logging a peer's fault as an error with a traceback: a peer that went amid a
    message, whose call is cancelled and reports it, or one that sent bytes that are no message.
    May be called any number of times."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_calm)
