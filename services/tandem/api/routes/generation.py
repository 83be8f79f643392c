"""The steps of a generation over HTTP that all APIs share, from the request body to the reply:

  1. The body is read within limits of size and time, and unknown fields are dropped.
  2. The route of the API parses the body.
  3. The reply is sent complete or as a stream of events.

If a request has the header `x-tandem-timing: 1`, the reply has the duration of each stage, in the
format of the header `Server-Timing` (W3C), which browsers and proxies understand:

  reply      place of the durations                    stages                 prompt
  complete   header `Server-Timing`                    all                    the last to end
  stream     header `Server-Timing`                    up to the first token  the first with a token
  stream     comment at the end, ignored by clients    all                    the last to end

If the body has several prompts, the durations are those of a single prompt: see the last column.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.api.http.body import read_json_object
from tandem.api.http.errors import JsonResponse
from tandem.api.http.stream import (
    EventStream,
    ReplyFormat,
    collect,
    first_delta,
    until_disconnect,
)
from tandem.api.openai.choices import generate_choices
from tandem.api.openai.fields import warn
from tandem.api.openai.requests import drop_unknown_fields
from tandem.api.openai.structured import Strict
from tandem.common.config.router import RouterConfig
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.admission.tenants import TENANT_HEADER, limits_of, tenant_of
from tandem.router.placement.hint import HINT_HEADER, PlacementHint
from tandem.router.placement.hint import read as read_hint
from tandem.router.placement.reasons import PLACEMENT_HEADER, TIMING_HEADER, asks
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Generator
from tandem.router.request.request import ClientRequest
from tandem.router.request.retention import is_of_session

# the class of a body, or a function that selects the class by the content of the body
BodyKind = type[Strict] | Callable[[dict[str, Any]], type[Strict]]
_TRACE_HEADERS = ("traceparent", "tracestate")


class GenerationRoutes:
    """The functions for reading requests and building replies that the routes of all APIs use."""

    def __init__(self, config: RouterConfig, generator: Generator) -> None:
        self.config = config
        self.generator = generator

    async def read(self, request: Request, kind: BodyKind) -> tuple[dict[str, Any], dict[str, str]]:
        """Reads a body and drops unknown fields. Returns the body and response headers. If fields
        were dropped, a header `warning` names them. Raises the errors of `read_json_object`."""
        body = await read_json_object(request, self.config)
        own = kind if isinstance(kind, type) else kind(body)
        headers: dict[str, str] = {}
        if not self.config.strict_fields:
            warn(
                headers, "unknown fields of the request are ignored", drop_unknown_fields(own, body)
            )
        return body, headers

    def tenant(self, request: Request) -> str:
        """Returns the tenant of a call, from the API key or a header. Raises BadRequest for a
        malformed header."""
        named = request.headers.getlist(TENANT_HEADER)
        return tenant_of(request.state.key, named, trusted=self.config.trust_tenant_header)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None until the model is loaded."""
        return self.generator.model.tokenizer if self.generator.model is not None else None

    def with_caller(
        self, request: Request, prepared: Sequence[ClientRequest], *, is_whole: bool = False
    ) -> list[ClientRequest]:
        """Returns copies of the requests with the fields that depend on the caller, such as the
        tenant. `is_whole`: True if the reply is complete, False if it is streamed."""
        caller = {
            "tenant": self.tenant(request),
            "limits": limits_of(request.state.key),
            "client_id": request.state.client_id,
            "is_of_session": is_of_session(request.headers.getlist),
            "is_whole": is_whole,
            "hint": self._hint(request),
        }
        return [replace(one, **caller) for one in prepared]

    def _hint(self, request: Request) -> PlacementHint | None:
        """Reads the hint in which an endpoint picker names the workers for the request. Returns
        None if there is no valid hint, if the hint is for another front, or if this router is not a
        front (a router beside one decode worker)."""
        value = request.headers.get(HINT_HEADER)
        own = self.config.gateway.front_of
        if value is None or not own:
            return None
        hint = read_hint(
            value, self.config.cluster.token, request_id=request.state.client_id, now=time.time()
        )
        is_own = hint is not None and hint.decode == own
        outcome = "followed" if is_own else "invalid" if hint is None else "other_worker"
        self.generator.metrics.hints.labels(outcome=outcome).inc()
        return hint if is_own else None

    def trace(self, request: Request) -> dict[str, str]:
        """Extracts the W3C trace context from the headers."""
        sent = request.headers
        return {name: sent[name] for name in _TRACE_HEADERS if name in sent}

    async def answer(
        self,
        request: Request,
        requests: Sequence[ClientRequest],
        replies: ReplyFormat,
        headers: Mapping[str, str],
        *,
        stream: bool,
    ) -> Response:
        """Starts a generation for each of `requests`, and builds the HTTP response."""
        sent = request.headers
        prepared = self.with_caller(request, requests, is_whole=not stream)
        deltas = generate_choices(self.generator, prepared, self.trace(request))
        with_timing = asks(sent.get(TIMING_HEADER))

        def answer_headers(last: Delta) -> dict[str, str]:
            own = {**last.limit_headers, **headers}
            if last.routed is not None and asks(sent.get(PLACEMENT_HEADER)):
                own[PLACEMENT_HEADER] = last.routed.reason
            if last.timeline is not None and with_timing:
                own["server-timing"] = last.timeline.server_timing()
            return own

        if stream:
            first = await first_delta(request, deltas)
            limit_headers = answer_headers(first.delta)
            return EventStream(first, deltas, replies, limit_headers, with_timing=with_timing)
        body, last = await until_disconnect(request.receive, collect(deltas, replies))
        return JsonResponse(body, headers=answer_headers(last))
