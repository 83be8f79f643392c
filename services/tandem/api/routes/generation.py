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
    BeforeEnd,
    EventStream,
    ReplyFormat,
    begin_stream,
    collect,
    until_disconnect,
)
from tandem.api.openai.choices import generate_choices
from tandem.api.openai.fields import LEFT_OUT, UNKNOWN, WITHOUT_EFFECT, warn
from tandem.api.openai.requests import drop_unknown_fields, hints_in
from tandem.api.openai.structured import Strict
from tandem.common.config.router import RouterConfig
from tandem.router.admission.tenants import TENANT_HEADER, limits_of, tenant_of
from tandem.router.placement.hint import HINT_HEADER, PlacementHint
from tandem.router.placement.hint import read as read_hint
from tandem.router.placement.reasons import PLACEMENT_HEADER, TIMING_HEADER, asks
from tandem.router.request.delta import Delta
from tandem.router.request.generator import Admission, Generator
from tandem.router.request.models import Models
from tandem.router.request.request import ClientRequest
from tandem.router.request.session import session_of
from tandem.router.request.urgency import waiting_of

# the class of a body, or a function that selects the class by the content of the body
BodyKind = type[Strict] | Callable[[dict[str, Any]], type[Strict]]
_TRACE_HEADERS = ("traceparent", "tracestate")
_NO_NAMES: Mapping[str, str] = {}


class GenerationRoutes:
    """The functions for reading requests and building replies that the routes of all APIs use."""

    def __init__(self, config: RouterConfig, models: Models) -> None:
        self.config = config
        self.models = models

    def model(self, request: Request, name: str) -> Generator:
        """Returns the generator for a call with this `model`. Raises ModelNotFound if the call's
        API key may not use the model."""
        return self.models.of(name, limits_of(request.state.key))

    async def read(self, request: Request, kind: BodyKind) -> tuple[dict[str, Any], dict[str, str]]:
        """Reads a body, and drops unknown fields and parts that are not supported. Returns the body
        and response headers. A header `warning` names what was dropped, and fields without effect.
        Raises the errors of `read_json_object`, and BadRequest if `tool_choice` needs a dropped
        tool."""
        body = await read_json_object(request, self.config)
        own: type[Strict] = kind if isinstance(kind, type) else kind(body)
        headers: dict[str, str] = {}
        if not self.config.strict_fields:
            warn(headers, UNKNOWN, drop_unknown_fields(own, body))
            warn(headers, LEFT_OUT, own.leave_out(body))
        warn(headers, WITHOUT_EFFECT, hints_in(own, body))
        return body, headers

    def tenant(self, request: Request) -> str:
        """Returns the tenant of a call, from the API key or a header. Raises BadRequest for a
        malformed header."""
        named = request.headers.getlist(TENANT_HEADER)
        return tenant_of(request.state.key, named, trusted=self.config.trust_tenant_header)

    def with_caller(
        self, request: Request, prepared: Sequence[ClientRequest], *, is_whole: bool = False
    ) -> list[ClientRequest]:
        """Returns copies of the requests with the fields that depend on the caller, such as the
        tenant. `is_whole`: True if the reply is complete, False if it is streamed."""
        caller = {
            "tenant": self.tenant(request),
            "limits": limits_of(request.state.key),
            "client_id": request.state.client_id,
            "is_whole": is_whole,
            "is_batch": getattr(request.state, "is_batch", False),
            "hint": self._hint(request),
            **waiting_of(request.headers.getlist),
        }
        session = session_of(request.headers.getlist)
        return [replace(one, **caller, session=session or one.session) for one in prepared]

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
        self.models.first.metrics.hints.labels(outcome=outcome).inc()
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
        headers: dict[str, str],
        *,
        stream: bool,
        names: Mapping[str, str] = _NO_NAMES,
        before_end: BeforeEnd | None = None,
    ) -> Response:
        """Starts a generation for each of `requests`, and builds the HTTP response. `names` maps
        fields of a chat to the names that they have in the API, for the header `warning`.
        `before_end` is awaited before the client gets the end of the answer."""
        sent = request.headers
        generator = self.model(request, requests[0].model)
        unread = [name for one in requests for name in generator.without_effect(one)]
        warn(headers, WITHOUT_EFFECT, [names.get(name, name) for name in unread])
        prepared = self.with_caller(request, requests, is_whole=not stream)
        together = generator.together(len(prepared))
        deltas = generate_choices(generator, prepared, self.trace(request), together=together)
        with_timing = asks(sent.get(TIMING_HEADER))

        def answer_headers(known: Delta | Admission) -> dict[str, str]:
            own = {**known.limit_headers, **headers}
            if known.routed is not None and asks(sent.get(PLACEMENT_HEADER)):
                own[PLACEMENT_HEADER] = known.routed.reason
            if with_timing and isinstance(known, Delta) and known.timeline is not None:
                own["server-timing"] = known.timeline.server_timing()
            return own

        if stream:
            # The stages until the first token are in a header, so it waits for that token.
            all_admitted = None if with_timing else together.all_admitted
            first = await begin_stream(request, deltas, all_admitted)
            known = first.result().delta if first.done() else together.admission
            return EventStream(
                first,
                deltas,
                replies,
                answer_headers(known),
                with_timing=with_timing,
                before_end=before_end,
            )
        body, last = await until_disconnect(request.receive, collect(deltas, replies))
        if before_end is not None:
            await before_end()
        return JsonResponse(body, headers=answer_headers(last))
