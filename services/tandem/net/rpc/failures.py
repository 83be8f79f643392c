"""Converts exceptions of handlers to gRPC statuses, without tracebacks in the log."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from inspect import isasyncgenfunction
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from tandem.errors import BadRequest, DeadlineExceeded, TandemError


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends the call with the error's code and message. If a retry may help, the trailing metadata
    has the number of seconds that the client should wait."""
    trailers: tuple[tuple[str, str], ...] = (("tandem-code", error.code), *error.headers.items())
    if error.retry_after_s is not None:
        after_s = error.retry_after_whole_s
        # gRPC's own retry policies read `grpc-retry-pushback-ms` (gRFC A6).
        trailers += (("retry-after", f"{after_s}"), ("grpc-retry-pushback-ms", f"{after_s}000"))
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), error.message, trailers)
    raise AssertionError("abort raises")


class FailureInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """If a handler raises TandemError or TimeoutError, ends the call with the status for the error.
    A streaming handler that is a coroutine, and not an asynchronous generator, must call `abort`
    itself.

    The interceptor also parses the messages. Otherwise gRPC would parse them, answer malformed
    bytes with UNKNOWN and log a traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.unary_unary is not None:
            return _unary(handler, method)
        serve = handler.stream_stream or handler.unary_stream
        return _stream(handler, serve, method) if isasyncgenfunction(serve) else handler


def _unary(handler: Any, method: str) -> Any:
    async def answer(body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _reporting(context, method):
            return await handler.unary_unary(_parsed(handler, body, method), context)

    return grpc.unary_unary_rpc_method_handler(
        answer, response_serializer=handler.response_serializer
    )


def _stream(handler: Any, serve: Callable[..., AsyncGenerator[Any, None]], method: str) -> Any:
    async def parsed(bodies: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for body in bodies:
            yield _parsed(handler, body, method)

    async def answer(sent: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with _reporting(context, method):
            request = parsed(sent) if handler.request_streaming else _parsed(handler, sent, method)
            async with aclosing(serve(request, context)) as answers:
                async for message in answers:
                    yield message

    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.request_streaming
        else grpc.unary_stream_rpc_method_handler
    )
    return make(answer, response_serializer=handler.response_serializer)


@asynccontextmanager
async def _reporting(
    context: grpc.aio.ServicerContext[Any, Any], method: str
) -> AsyncIterator[None]:
    try:
        yield
    except TandemError as error:
        await abort(context, error)
    except TimeoutError:
        await abort(context, DeadlineExceeded(f"{method} was not answered in time"))


def _parsed(handler: Any, body: bytes, method: str) -> Any:
    """Parses the message in `body`. Raises BadRequest if the message is malformed."""
    parse = handler.request_deserializer
    try:
        return parse(body) if parse else body
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the request is not a valid message of {method}: {error}. All strings in the "
            "message must be UTF-8"
        ) from None


def _lower_level(record: logging.LogRecord) -> bool:
    """A filter for log records. Sets the level of records about lost peers and malformed messages
    to INFO, because the server has made no error."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, grpc.aio.InternalError | DecodeError):
        record.levelno = logging.INFO
        record.levelname = "INFO"
        record.exc_info = None
    return True


def quiet_peer_faults() -> None:
    """Keeps gRPC from logging a traceback if a peer sends a malformed message or disconnects in the
    middle of a message. The interrupted call reports such a fault anyway. The function may be
    called repeatedly."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_lower_level)
