"""Serves the endpoint picker to an inference gateway over Envoy's external processing protocol
(ext_proc).

For each HTTP request, the gateway opens one stream and sends the request as several messages: the
headers, chunks of the body, and trailers. The gateway chooses how it sends the body:

  body mode               when the picker picks        the answer that names the endpoint
  FULL_DUPLEX_STREAMED    after the end of the body    the answer to the headers, delayed until then
  BUFFERED, or            at the single message with   the answer to that message
  BUFFERED_PARTIAL        the body
  any other mode          at the headers, at random    the answer to the headers

A request without a body is handled as in the last row. If the picker refuses a request, it answers
with an error, which the gateway returns to the client.

After its last answer the picker ends the stream, so the response does not depend on the picker.
With `--picker-stays` the stream stays open, and the picker returns each message of the response
unchanged.

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
CHUNK_BYTES_MAX = 60_000  # largest part of a body in one answer; Envoy advises at most 64 KiB
# body modes of ext_proc in which the picker reads the body before it picks an endpoint
_WITH_BODY = (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL)


@dataclass(slots=True)
class _Exchange:
    """The state of one request and its ext_proc stream."""

    request: PickRequest | None = None
    # True: the client sent no valid request id, so the picker adds one. False: the client's id is
    # used.
    sets_id: bool = False
    request_mode: int = pb.FULL_DUPLEX_STREAMED
    response_mode: int = pb.FULL_DUPLEX_STREAMED
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    # time on the event loop's clock until which the next message must arrive; None: no limit
    body_until: float | None = None
    # counts the bytes of this request in the body budget, which limits the memory of all bodies
    account: Body | None = None
    # timeout of the current read from the stream; None: nothing is being read
    reading: asyncio.Timeout | None = None
    pick: Pick | None = None
    is_answered: bool = False  # True: all messages of the request have been answered


class ExternalProcessor:
    """Serves the ext_proc protocol to gateways. The caller adds `handlers()` to a gRPC server."""

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
                # There is no read to interrupt: the picker waits for the gateway to take an answer.
                task.cancel()
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
                if exchange.is_answered and not self._config.gateway.picker_stays:
                    return
        except TandemError as error:
            yield _refusal(error, exchange.request)
        finally:
            accounts.close()
            # Only with --picker-stays does the picker see the end of the response. Without
            # --picker-stays, the request counts as load of the picked workers until the workers
            # report a load that includes the request.
            if exchange.pick is not None and self._config.gateway.picker_stays:
                self._picker.release(exchange.pick, has_token=False)

    async def _next(
        self, exchange: _Exchange, messages: AsyncIterator[pb.ProcessingRequest]
    ) -> pb.ProcessingRequest | None:
        """Reads the next message of the stream. Returns None at the end of the stream. Raises
        BodyTooLate after the deadline, and BodiesFull if the body budget is used up."""
        try:
            async with asyncio.timeout_at(exchange.body_until) as exchange.reading:
                return await anext(messages, None)
        except TimeoutError:
            if exchange.account is not None:
                exchange.account.check()
            raise BodyTooLate(
                "the rest of the request did not arrive in time (--header-deadline, "
                "--body-deadline)"
            ) from None
        finally:
            exchange.reading = None

    async def _answers(
        self, exchange: _Exchange, message: pb.ProcessingRequest
    ) -> Iterable[pb.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if (kind == "request_headers") != (exchange.request is None):
            raise BadRequest(
                "an ext_proc stream must begin with request_headers, and must not send "
                "request_headers again"
            )
        if kind == "request_headers":
            return await self._on_headers(exchange, message)
        if kind == "request_body":
            return await self._on_body(exchange, message.request_body)
        if kind == "request_trailers":
            answers = [] if exchange.pick else await self._answer_request(exchange, ends_here=False)
            exchange.is_answered = True
            return [*answers, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
        return self._on_response(exchange, message)

    async def _on_headers(
        self, exchange: _Exchange, message: pb.ProcessingRequest
    ) -> list[pb.ProcessingResponse]:
        if message.HasField("protocol_config"):
            exchange.request_mode = message.protocol_config.request_body_mode
            exchange.response_mode = message.protocol_config.response_body_mode
        exchange.request, exchange.sets_id = _read_headers(message)
        exchange.body_until = None
        has_body = not message.request_headers.end_of_stream
        if has_body and exchange.request_mode in _WITH_BODY:
            now = asyncio.get_running_loop().time()
            exchange.body_until = now + self._config.body_deadline_s
            if exchange.request_mode == pb.FULL_DUPLEX_STREAMED:
                return []
            return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
        exchange.is_answered = not has_body or exchange.request_mode == pb.NONE
        return [await self._picked(exchange, "request_headers")]

    async def _on_body(
        self, exchange: _Exchange, part: pb.HttpBody
    ) -> Iterable[pb.ProcessingResponse]:
        if exchange.request_mode not in _WITH_BODY:
            exchange.is_answered = part.end_of_stream
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._take(exchange, part.body)
        exchange.is_answered = part.end_of_stream
        if exchange.request_mode != pb.FULL_DUPLEX_STREAMED:
            return [await self._picked(exchange, "request_body")]
        return await self._answer_request(exchange, ends_here=True) if part.end_of_stream else []

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

    async def _answer_request(
        self, exchange: _Exchange, *, ends_here: bool
    ) -> Iterable[pb.ProcessingResponse]:
        """Picks an endpoint, and builds the answers to the headers and to all buffered chunks of
        the body. `ends_here`: True if the buffered chunks end the body, False if trailers
        follow."""
        picked = await self._picked(exchange, "request_headers")
        chunks = exchange.chunks
        exchange.chunks = []
        bodies = _chunks(chunks, ends_here=ends_here)
        return chain([picked], (pb.ProcessingResponse(request_body=body) for body in bodies))

    async def _picked(self, exchange: _Exchange, part: str) -> pb.ProcessingResponse:
        """Picks an endpoint and builds the answer that names the endpoint. `part` is the message to
        answer: "request_headers" or "request_body"."""
        assert exchange.request is not None
        exchange.body_until = None
        exchange.pick = await self._picker.pick(exchange.request, b"".join(exchange.chunks))
        endpoints = ",".join(exchange.pick.endpoints)
        sets = {ENDPOINT_KEY: endpoints}
        if exchange.pick.hint:
            sets[HINT_HEADER] = exchange.pick.hint
        if exchange.sets_id:
            sets[REQUEST_ID_HEADER] = exchange.request.request_id
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


def _read_headers(message: pb.ProcessingRequest) -> tuple[PickRequest, bool]:
    """Parses the headers of a request. The second result is True if the client sent no usable
    request id, so that the request got a new id."""
    headers = _values(message.request_headers.headers)
    sent = read_client_id(headers.get(REQUEST_ID_HEADER, []))
    path = headers.get(":path", [""])[0]
    subset = _subset(message.metadata_context)
    return PickRequest(path, headers, sent or uuid.uuid4().hex, subset), not sent


def _subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Reads the endpoints to which the gateway restricts the pick. Returns None if the gateway
    allows all endpoints."""
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
    """Splits chunks of a body into messages of at most CHUNK_BYTES_MAX. `ends_here`: True if the
    last message gets the mark for the end of the body."""
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


def _refusal(error: TandemError, request: PickRequest | None) -> pb.ProcessingResponse:
    """Builds the answer that refuses a request, in the format of the API that the client called."""
    path = request.path.partition("?")[0] if request is not None else ""
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
