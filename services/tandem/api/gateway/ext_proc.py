"""Serves an endpoint picker over Envoy's external processing protocol, one stream for each request.

    headers --no body-----------------------------------> picked --> end, or the answer's parts
            --body, chunk by chunk, its end or trailers-> picked --> end, or the answer's parts
            `-- refused: the gateway answers the client

The parts of a request are answered once it is picked, in their order: headers, chunks as they
came, trailers. Then the picker ends the stream, and the gateway goes on without it: an answer
depends on no picker. If it is to stay (`--picker-stays`), it passes each part of the answer on. A
gateway that sends the body otherwise
than in full duplex gets each part's answer at once: with the whole body in one message the pick
goes with that one; without a body it is made by load alone.

Protocol: proposal 004 of the Gateway API Inference Extension, version 1.0.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import grpc
import grpc.aio
from google.protobuf.struct_pb2 import ListValue, Struct

from tandem.api.gateway.picker import EndpointPicker, Pick, PickRequest
from tandem.api.grpc.access import peer_address
from tandem.api.http.errors import error_response
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest, BodyTooLarge, BodyTooLate, TandemError
from tandem.net.rpc.tandem.v1 import ext_proc_pb2 as pb
from tandem.net.security.body_budget import Body
from tandem.router.placement.hint import HINT_HEADER
from tandem.router.request.request import REQUEST_ID_HEADER, read_client_id

_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT_KEY = "x-gateway-destination-endpoint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
PICKED_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
CHUNK_BYTES_MAX = 60_000  # Envoy advises at most 64 KiB
_WITH_BODY = (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL)  # before the pick


@dataclass(slots=True)
class _Exchange:
    """One request on its stream."""

    asked: PickRequest | None = None
    sets_id: bool = False  # the client sent no usable id
    request_mode: int = pb.FULL_DUPLEX_STREAMED
    response_mode: int = pb.FULL_DUPLEX_STREAMED
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    body_until: float | None = None  # seconds of the loop's clock; None: nothing is awaited
    account: Body | None = None  # of everything that is held of the request
    reading: asyncio.Timeout | None = None  # while a part is awaited
    pick: Pick | None = None
    is_through: bool = False  # all of the request is answered


class ExternalProcessor:
    """Answers gateways; add its `handlers` to a gRPC server."""

    def __init__(self, config: RouterConfig, picker: EndpointPicker) -> None:
        self._config = config
        self._picker = picker

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(
        self, messages: AsyncIterator[pb.ProcessingRequest], context: _Context
    ) -> AsyncGenerator[pb.ProcessingResponse, None]:
        now = asyncio.get_running_loop().time()
        task = asyncio.current_task()
        assert task is not None
        exchange = _Exchange(body_until=now + self._config.header_deadline_s)

        def revoke() -> None:
            if exchange.reading is None:
                task.cancel()  # the gateway takes no answer
            elif not exchange.reading.expired():
                exchange.reading.reschedule(0)

        access = self._picker.access
        peer = peer_address(context)
        accounts = ExitStack()
        try:
            while (message := await self._next(exchange, messages)) is not None:
                if exchange.account is None:
                    forwarded = _values(message.request_headers.headers).get("x-forwarded-for", [])
                    address = access.clients.address(peer, forwarded)
                    exchange.account = accounts.enter_context(access.bodies.body(address, revoke))
                if exchange.pick is None:
                    exchange.account.take(message.ByteSize())
                for answer in await self._answers(exchange, message):
                    yield answer
                if exchange.pick is not None:
                    exchange.account.release()
                if exchange.is_through and not self._config.gateway.picker_stays:
                    return
        except TandemError as error:
            yield _refusal(error, exchange.asked)
        finally:
            accounts.close()
            # A pick whose answer is not followed counts until its workers report their load.
            if exchange.pick is not None and self._config.gateway.picker_stays:
                self._picker.release(exchange.pick, has_token=False)

    async def _next(
        self, exchange: _Exchange, messages: AsyncIterator[pb.ProcessingRequest]
    ) -> pb.ProcessingRequest | None:
        """Returns the next part; None at the end. Raises BodyTooLate and BodiesFull."""
        try:
            async with asyncio.timeout_at(exchange.body_until) as exchange.reading:
                return await anext(messages, None)
        except TimeoutError:
            if exchange.account is not None:
                exchange.account.check()
            raise BodyTooLate("the request did not arrive in time") from None
        finally:
            exchange.reading = None

    async def _answers(
        self, exchange: _Exchange, message: pb.ProcessingRequest
    ) -> Iterable[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if (kind == "request_headers") != (exchange.asked is None):
            raise BadRequest("the request's headers must come first on a stream, and once")
        if kind == "request_headers":
            return await self._on_headers(exchange, message)
        if kind == "request_body":
            return await self._on_body(exchange, message.request_body)
        if kind == "request_trailers":
            told = [] if exchange.pick else await self._whole(exchange, ends_here=False)
            exchange.is_through = True
            return [*told, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        return self._on_response(exchange, message)

    async def _on_headers(
        self, exchange: _Exchange, message: pb.ProcessingRequest
    ) -> list[pb.ProcessingResponse]:
        if message.HasField("protocol_config"):
            exchange.request_mode = message.protocol_config.request_body_mode
            exchange.response_mode = message.protocol_config.response_body_mode
        exchange.asked, exchange.sets_id = _asked(message)
        exchange.body_until = None
        has_body = not message.request_headers.end_of_stream
        if has_body and exchange.request_mode in _WITH_BODY:
            now = asyncio.get_running_loop().time()
            exchange.body_until = now + self._config.body_deadline_s
            if exchange.request_mode == pb.FULL_DUPLEX_STREAMED:
                return []
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        exchange.is_through = not has_body or exchange.request_mode == pb.NONE
        return [await self._picked(exchange, "request_headers")]

    async def _on_body(
        self, exchange: _Exchange, part: pb.HttpBody
    ) -> Iterable[pb.ProcessingResponse]:
        if exchange.request_mode not in _WITH_BODY:
            exchange.is_through = part.end_of_stream
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._take(exchange, part.body)
        exchange.is_through = part.end_of_stream
        if exchange.request_mode != pb.FULL_DUPLEX_STREAMED:
            return [await self._picked(exchange, "request_body")]
        return await self._whole(exchange, ends_here=True) if part.end_of_stream else []

    def _on_response(
        self, exchange: _Exchange, message: pb.ProcessingRequest
    ) -> list[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            if exchange.pick is not None:
                status = _values(message.response_headers.headers).get(":status", ["0"])[0]
                self._picker.release(exchange.pick, has_token=status.startswith("2"))
            return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]
        if kind == "response_trailers":
            return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        if kind != "response_body":
            return []
        part = message.response_body
        if exchange.response_mode != pb.FULL_DUPLEX_STREAMED:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        chunks = _chunks([part.body], ends_here=part.end_of_stream)
        return [pb.ProcessingResponse(response_body=body) for body in chunks]

    def _take(self, exchange: _Exchange, chunk: bytes) -> None:
        exchange.num_bytes += len(chunk)
        if exchange.num_bytes > self._config.body_bytes_max:
            raise BodyTooLarge(f"the body must have at most {self._config.body_bytes_max} bytes")
        exchange.chunks.append(chunk)

    async def _whole(
        self, exchange: _Exchange, *, ends_here: bool
    ) -> Iterable[pb.ProcessingResponse]:
        """Returns the answers to the headers and to the body, which is all here."""
        picked = await self._picked(exchange, "request_headers")
        chunks = exchange.chunks
        exchange.chunks = []
        bodies = _chunks(chunks, ends_here=ends_here)
        return chain([picked], (pb.ProcessingResponse(request_body=body) for body in bodies))

    async def _picked(self, exchange: _Exchange, part: str) -> pb.ProcessingResponse:
        """Returns the answer that tells of the pick."""
        assert exchange.asked is not None
        exchange.body_until = None
        exchange.pick = await self._picker.pick(exchange.asked, b"".join(exchange.chunks))
        endpoints = ",".join(exchange.pick.endpoints)
        sets = {ENDPOINT_KEY: endpoints}
        if exchange.pick.hint:
            sets[HINT_HEADER] = exchange.pick.hint
        if exchange.sets_id:
            sets[REQUEST_ID_HEADER] = exchange.asked.request_id
        removes = [] if exchange.pick.hint else [HINT_HEADER]
        common = pb.CommonResponse(
            header_mutation=pb.HeaderMutation(set_headers=_options(sets), remove_headers=removes),
            clear_route_cache=True,
        )
        metadata = Struct()
        metadata.update({PICKED_NAMESPACE: {ENDPOINT_KEY: endpoints}})
        if part == "request_body":
            answer = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
        else:
            answer = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        answer.dynamic_metadata.CopyFrom(metadata)
        return answer


def _asked(message: pb.ProcessingRequest) -> tuple[PickRequest, bool]:
    """Returns the request, and whether its id is made here."""
    headers = _values(message.request_headers.headers)
    sent = read_client_id(headers.get(REQUEST_ID_HEADER, []))
    path = headers.get(":path", [""])[0]
    subset = _subset(message.metadata_context)
    return PickRequest(path, headers, sent or uuid.uuid4().hex, subset), not sent


def _subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Returns the endpoints that the gateway lets the picker choose from; None if it lets all."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET_KEY not in hint:
        return None
    value = hint[SUBSET_KEY]
    entries = list(value) if isinstance(value, ListValue) else [value]
    named = [entry for entry in entries if isinstance(entry, str)]
    return frozenset(one.strip() for entry in named for one in entry.split(",") if one.strip())


def _values(headers: pb.HeaderMap) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for header in headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        found.setdefault(header.key.lower(), []).append(value)
    return found


def _options(values: dict[str, str]) -> list[pb.HeaderValueOption]:
    return [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=key, raw_value=value.encode()),
            append_action=pb.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for key, value in values.items()
    ]


def _chunks(bodies: list[bytes], *, ends_here: bool) -> Iterator[pb.BodyResponse]:
    """Yields bodies as chunks that a gateway takes; the last one ends the body, if it ends here."""
    pieces = [
        body[start : start + CHUNK_BYTES_MAX]
        for body in bodies
        for start in range(0, max(1, len(body)), CHUNK_BYTES_MAX)
    ]
    for number, piece in enumerate(pieces, 1):
        is_end = ends_here and number == len(pieces)
        streamed = pb.StreamedBodyResponse(body=piece, end_of_stream=is_end)
        mutation = pb.BodyMutation(streamed_response=streamed)
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def _refusal(error: TandemError, asked: PickRequest | None) -> pb.ProcessingResponse:
    """Returns the answer for the client, in the form of the API that it called."""
    path = asked.path.partition("?")[0] if asked is not None else ""
    response = error_response(error, {"type": "http", "path": path, "headers": []})
    kept = {"content-type", "retry-after"}
    headers = {name: value for name, value in response.headers.items() if name in kept}
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=error.http_status),
            headers=pb.HeaderMutation(set_headers=_options(headers)),
            body=bytes(response.body),
            details=error.code,
        )
    )
