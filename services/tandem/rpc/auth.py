"""The cluster's token on every internal call: added by clients, demanded by servers."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

_HEADER = "authorization"
_REFUSAL = "the cluster's token is missing or wrong"


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata for a call on the private data plane."""
    return ((_HEADER, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers UNAUTHENTICATED to calls without the cluster's token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get(_HEADER, "")
        if hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return _refusing(handler)


def _refusing(handler: Any) -> Any:
    """A handler of the same kind that only refuses: gRPC wants the kinds to agree."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield

    if handler is None:
        return None
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
