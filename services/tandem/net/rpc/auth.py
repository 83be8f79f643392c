"""Authenticates calls to a worker by the cluster's token, and authorizes them by the caller's kind
of process (router or worker).

Both checks run before a call's body is read, so that an unauthorized call needs at most one
flow-control window of memory. With a stream handler, gRPC reads the body only when the handler
requests a message. So a refused call gets a stream handler that requests no message. This also
works for calls that are not streams, because such a call is sent as a stream of one message.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc.aio

from tandem.common.config.tls import Kind, certificate_name

_HEADER = "authorization"
_REFUSAL = "the cluster's token is missing or wrong"
_WRONG_KIND = "the certificate is of a kind of process that may not make this call"
# Key in gRPC's authentication context that has the names in the peer's certificate.
_NAMES = "x509_subject_alternative_name"

# Method of tandem.v1.Worker -> the kind of process that may call it. No process may call a method
# that is missing here.
CALLERS: dict[str, Kind] = {
    "AddAdapter": "router",
    "Decode": "router",
    "DescribeAdapter": "router",
    "Drain": "router",
    "GetState": "router",
    "Keep": "router",
    "ListBlocks": "router",
    "ReadLog": "router",
    "RemoveAdapter": "router",
    "ResetPrefixCache": "router",
    "SetRole": "router",
    "Connect": "worker",
    "Encode": "worker",
    "FetchBlocks": "worker",
    "ListChains": "worker",
    "Prefill": "worker",
    "Probe": "worker",
}


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Builds the gRPC metadata with the cluster's token. Calls between processes need it."""
    return ((_HEADER, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the cluster's token (UNAUTHENTICATED)."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get(_HEADER, "")
        if handler is None or hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


class KindInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses a call if the certificate of the calling process does not name the kind of process
    that the method requires (PERMISSION_DENIED)."""

    def __init__(self, cluster_id: str, callers: Mapping[str, Kind] = CALLERS) -> None:
        self._names = {
            method: certificate_name(kind, cluster_id).encode() for method, kind in callers.items()
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]
        return _checked(handler, self._names.get(method, b""))


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)


def _checked(handler: Any, name: bytes) -> Any:
    """Returns a handler that calls `handler` only for peers whose certificate has the name `name`.
    The result is a stream handler, because a stream handler can check the peer before the body is
    read."""
    serve = (
        handler.stream_stream or handler.unary_stream or handler.stream_unary or handler.unary_unary
    )

    async def admit(requests: AsyncIterator[Any], context: Any) -> Any:
        if name not in context.auth_context().get(_NAMES, ()):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, _WRONG_KIND)
        if handler.request_streaming:
            return requests
        try:
            return await anext(aiter(requests))
        except StopAsyncIteration:
            return await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the call has no request message"
            )

    async def answer_stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        request = await admit(requests, context)
        async with aclosing(serve(request, context)) as answers:
            async for answer in answers:
                yield answer

    async def answer_once(requests: AsyncIterator[Any], context: Any) -> Any:
        return await serve(await admit(requests, context), context)

    make, answer = (
        (grpc.stream_stream_rpc_method_handler, answer_stream)
        if handler.response_streaming
        else (grpc.stream_unary_rpc_method_handler, answer_once)
    )
    return make(answer, handler.request_deserializer, handler.response_serializer)
