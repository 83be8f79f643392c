"""The gRPC API `tandem.v1.Inference`: generation and embeddings for clients.

Like the HTTP API, this module only translates between messages and the router's own types. Requests
arrive as bytes, and `_parse` parses them. gRPC's own deserializer is not used: for invalid UTF-8 in
a string field it would answer with the status UNKNOWN before Tandem's code runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.api.grpc.access import CallGuard
from tandem.api.grpc.chat import parse_chat
from tandem.api.grpc.embeddings import EmbedAnswer, parse_inputs
from tandem.api.grpc.usage import usage_message
from tandem.api.openai.embeddings import NAMES, check_dimensions, embed
from tandem.api.openai.fields import WITHOUT_EFFECT, warn
from tandem.common.config.router import RouterConfig
from tandem.common.kv_budget import SINKS_DEFAULT, SINKS_WINDOW, KvBudget
from tandem.common.retention import PRIORITY_DEFAULT
from tandem.common.sampling_params import SamplingParams
from tandem.errors import BadRequest, RequestNotFound, TandemError
from tandem.models.grammars.text import StructuredOutput
from tandem.net.rpc.convert import to_fields
from tandem.net.rpc.failures import abort
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.admission.tenants import TENANT_HEADER, limits_of, tenant_of, visible_tenant
from tandem.router.limits.usage import UsageQuery
from tandem.router.placement.reasons import PLACEMENT_HEADER, TIMING_HEADER, asks
from tandem.router.request.allowed import refusal, renamed
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.router.request.models import Models
from tandem.router.request.request import (
    MODEL_DEFAULTS,
    REQUEST_ID_HEADER,
    ClientRequest,
    Prompt,
    read_client_id,
)
from tandem.router.request.retention import asked_retention
from tandem.router.request.session import session_of
from tandem.router.request.urgency import priority_of, waiting_of

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_TRACE_KEYS = ("traceparent", "tracestate")
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class _ClientStalled(Exception):
    """The client has not read its response for `send_deadline_s`."""


class GrpcApi:
    """Serves the inference API. The caller adds `handlers()` to a gRPC server."""

    def __init__(self, config: RouterConfig, models: Models, guard: CallGuard) -> None:
        self._config = config
        self._guard = guard
        self._models = models

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self._generate, response_serializer=pb.GenerateResponse.SerializeToString
                ),
                "Embed": grpc.unary_stream_rpc_method_handler(
                    self._embed, response_serializer=pb.EmbedResponse.SerializeToString
                ),
                "GetRequest": grpc.unary_unary_rpc_method_handler(
                    self._get_request, response_serializer=pb.RequestRecord.SerializeToString
                ),
                "GetUsage": grpc.unary_unary_rpc_method_handler(
                    self._get_usage, response_serializer=pb.GetUsageResponse.SerializeToString
                ),
                "ListModels": grpc.unary_unary_rpc_method_handler(
                    self._list_models, response_serializer=pb.ListModelsResponse.SerializeToString
                ),
            },
        )

    async def _generate(self, body: bytes, context: _Context) -> None:
        await self._stream(self._completions, body, context)

    async def _embed(self, body: bytes, context: _Context) -> None:
        await self._stream(self._embeddings, body, context)

    async def _stream(
        self,
        answer: Callable[[bytes, _Context], Awaitable[None]],
        body: bytes,
        context: _Context,
    ) -> None:
        """Runs `answer`, which streams the response. A TandemError becomes the status of the call.
        If the client reads nothing for `send_deadline_s`, the call ends with CANCELLED."""
        try:
            with self._guard.place(context):
                await answer(body, context)
        except TandemError as error:
            await abort(context, error)
        except _ClientStalled:
            # The router has already cancelled the request. gRPC delivers this status when the
            # client reads again, or drops the status if the client disconnects.
            late = f"the client read no message for {self._config.send_deadline_s:g} s"
            log.info("a gRPC call was cancelled: %s", late)
            await context.abort(grpc.StatusCode.CANCELLED, late)

    async def _caller(self, context: _Context, method: str) -> dict[str, Any]:
        """Checks the API key of a call. Returns the fields of a ClientRequest that depend on the
        caller, such as the tenant. Raises the errors of `CallGuard.check`, and BadRequest for
        malformed metadata."""
        key = await self._guard.check("user", context, method)
        named = _metadata(context, TENANT_HEADER)
        session = session_of(partial(_metadata, context))
        return {
            "tenant": tenant_of(key, named, trusted=self._config.trust_tenant_header),
            "limits": limits_of(key),
            "client_id": read_client_id(_metadata(context, REQUEST_ID_HEADER)),
            **({"session": session} if session else {}),
            **waiting_of(partial(_metadata, context)),
        }

    async def _embeddings(self, body: bytes, context: _Context) -> None:
        caller = await self._caller(context, "Embed")
        message = _parse(pb.EmbedRequest(), body)
        with renamed(NAMES):
            dimensions = message.dimensions if message.HasField("dimensions") else None
            generator = self._models.of(message.model, caller["limits"])
            check_dimensions(dimensions, generator)
            requests = [replace(one, **caller) for one in parse_inputs(message)]
            answer = EmbedAnswer(requests)
            async with aclosing(embed(generator, requests, _trace(context))) as deltas:
                async for delta in deltas:
                    if delta.limit_headers:
                        context.set_trailing_metadata(tuple(delta.limit_headers.items()))
                    await self._send(context, answer.next(delta))

    async def _completions(self, body: bytes, context: _Context) -> None:
        caller = await self._caller(context, "Generate")
        request = replace(parse_request(body), **caller)
        wants_placement = any(map(asks, _metadata(context, PLACEMENT_HEADER)))
        wants_timing = any(map(asks, _metadata(context, TIMING_HEADER)))
        generator = self._models.of(request.model, request.limits)
        async with aclosing(generator.generate(request, _trace(context))) as deltas:
            async for delta in deltas:
                trailers = dict(delta.limit_headers)
                if delta.total is not None:
                    warn(trailers, WITHOUT_EFFECT, generator.without_effect(request))
                if wants_timing and delta.total is not None and delta.timeline is not None:
                    trailers["server-timing"] = delta.timeline.server_timing()
                if trailers and delta.total is not None:
                    context.set_trailing_metadata(tuple(trailers.items()))
                if wants_placement and delta.routed is not None:
                    placement = ((PLACEMENT_HEADER, delta.routed.reason),)
                    await context.send_initial_metadata(placement)
                    wants_placement = False
                await self._send(context, _response(request.request_id, delta))

    async def _send(
        self, context: _Context, response: pb.GenerateResponse | pb.EmbedResponse
    ) -> None:
        """Sends a message. While the client does not read, the message waits for up to
        `send_deadline_s`; then _ClientStalled is raised."""
        try:
            async with asyncio.timeout(self._config.send_deadline_s):
                await context.write(response)
        except TimeoutError:
            raise _ClientStalled from None

    async def _get_request(self, body: bytes, context: _Context) -> pb.RequestRecord:
        key = await self._guard.check("user", context, "GetRequest")
        message = _parse(pb.GetRequestRequest(), body)
        tenant = visible_tenant(key)
        requests = self._models.log_of(message.request_id, tenant)
        try:
            found = requests.find(message.request_id, tenant).as_dict()
        except RequestNotFound as error:
            if requests.is_of_another(message.request_id, tenant):
                self._guard.log_refusal(context, "GetRequest", key, error)
            raise
        request_id = found.pop("id")
        found.pop("object")
        return pb.RequestRecord(request_id=request_id, **found)

    async def _get_usage(self, body: bytes, context: _Context) -> pb.GetUsageResponse:
        key = await self._guard.check("user", context, "GetUsage")
        message = _parse(pb.GetUsageRequest(), body)
        tenant = message.tenant if message.HasField("tenant") else None
        query = UsageQuery.of(message.window or "day", message.num_windows or 1, tenant, key)
        rows = await self._models.first.tenants.usage.read(query, now=time.time())
        return pb.GetUsageResponse(usage=[pb.TenantUsage(**asdict(row)) for row in rows])

    async def _list_models(self, body: bytes, context: _Context) -> pb.ListModelsResponse:
        key = await self._guard.check("user", context, "ListModels")
        _parse(pb.ListModelsRequest(), body)
        found = []
        for generator in self._models:
            allowed = self._models.names(generator, limits_of(key))
            found += [each for each in _models_of(generator) if each.id in allowed]
        return pb.ListModelsResponse(models=found)


def _models_of(generator: Generator) -> list[pb.Model]:
    """Describes a model and its adapters; empty until the model is loaded."""
    if generator.model is None:
        return []
    model = pb.Model(
        id=generator.served_name,
        max_model_len=generator.max_model_len,
        root=generator.model.folder.name,
        created=generator.model.created_s,
    )
    adapters = [
        pb.Model(
            id=adapter.name,
            max_model_len=generator.max_model_len,
            root=adapter.name,
            created=int(adapter.added_at),
            parent=model.id,
        )
        for adapter in generator.adapters
    ]
    return [model, *adapters]


def parse_request(body: bytes) -> ClientRequest:
    """Parses a GenerateRequest. Raises BadRequest that names the invalid field and the allowed
    values."""
    message = _parse(pb.GenerateRequest(), body)
    return ClientRequest(
        prompt=_prompt(message),
        model=message.model,
        sampling=_sampling_params(message),
        omitted=frozenset(n for n in MODEL_DEFAULTS if not message.sampling.HasField(n)),
        echo=message.echo,
        add_special_tokens=not message.HasField("add_special_tokens") or message.add_special_tokens,
        structured_output=_structured_output(message),
        best_of=message.best_of if message.HasField("best_of") else None,
        use_beam_search=message.use_beam_search,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        retention=asked_retention(
            message.prompt_cache_retention or None,
            message.prompt_cache_key or None,
            message.kv_priority if message.HasField("kv_priority") else PRIORITY_DEFAULT,
        ),
        session=message.prompt_cache_key,
        priority=priority_of(message.priority, None),
        kv_budget=_kv_budget(message.kv_budget) if message.HasField("kv_budget") else None,
    )


def _kv_budget(message: pb.KvBudget) -> KvBudget:
    return KvBudget(
        tokens=message.tokens,
        sinks=message.sinks if message.HasField("sinks") else SINKS_DEFAULT,
        policy=message.policy or SINKS_WINDOW,
    )


def _structured_output(message: pb.GenerateRequest) -> StructuredOutput | None:
    if not message.HasField("structured_output"):
        return None
    given = message.structured_output
    field = "structured_output"
    match given.WhichOneof("form"):
        case "json_object":
            return StructuredOutput(field, "json_object")
        case "json_schema":
            return StructuredOutput(field, "json_schema", given.json_schema, given.lenient)
        case "regex":
            return StructuredOutput(field, "regex", given.regex)
        case "choice":
            return StructuredOutput(field, "choice", json.dumps(list(given.choice.texts)))
        case "grammar":
            return StructuredOutput(field, "grammar", given.grammar)
    raise refusal(field)


def _sampling_params(message: pb.GenerateRequest) -> SamplingParams:
    own = to_fields(SamplingParams, message)
    return SamplingParams(
        **{"max_tokens": None} | own | to_fields(SamplingParams, message.sampling)
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    if kind == "chat":
        return parse_chat(message.chat)
    raise refusal("prompt", why="missing: set text, token_ids or chat")


def _parse(message: Any, body: bytes) -> Any:
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the message must be a valid {message.DESCRIPTOR.full_name} whose strings are UTF-8: "
            f"{error}"
        ) from None
    return message


def _response(request_id: str, delta: Delta) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        reasoning=delta.reasoning,
        tool_calls=[pb.ToolCallDelta(**asdict(call)) for call in delta.tool_calls],
        logprobs=map(_logprobs, delta.logprobs),
        prompt_logprobs=map(_logprobs, delta.prompt_logprobs),
        index=delta.index,
    )
    if delta.prompt_token_ids is not None:
        response.prompt_tokens = delta.usage.prompt_tokens
    if delta.finish_reason:
        response.finish_reason = delta.finish_reason
        if isinstance(delta.stop_reason, str):
            response.stop_reason = delta.stop_reason
        elif delta.stop_reason is not None:
            response.stop_token_id = delta.stop_reason
    if delta.total is not None:
        response.usage.CopyFrom(usage_message(delta.total))
    return response


def _metadata(context: _Context, name: str) -> list[str]:
    """Returns all values that the client sent for the metadata key `name`."""
    sent = context.invocation_metadata() or ()
    return [str(value) for key, value in sent if key == name]


def _trace(context: _Context) -> dict[str, str]:
    """Extracts the W3C trace context from the call's metadata."""
    return {name: value for name in _TRACE_KEYS for value in _metadata(context, name)}


def _logprobs(entry: LogprobEntry) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_ids=entry.top_ids,
        top_logprobs=entry.top_logprobs,
    )
