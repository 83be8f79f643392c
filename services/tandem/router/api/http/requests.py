"""`/v1/requests/ID` shows a request that this router served of late; headers carry timings.

A request that sends `x-tandem-timing: 1` gets its stages back as `Server-Timing` (W3C), which
browsers and proxies know. Of a stream the header has what lies before the first token, when it is
sent; all of it follows as a comment before `[DONE]`, which clients of server-sent events ignore.
Of several prompts the headers tell of one: the first with a token (a stream), or the last to end.
"""

from fastapi import FastAPI, Request
from starlette.responses import Response

from tandem.router.api.http.errors import JsonResponse
from tandem.router.placement.reasons import PLACEMENT_HEADER, TIMING_HEADER, asks
from tandem.router.request.generator import Delta, Generator

_TRACE_HEADERS = ("traceparent", "tracestate")


def add_request_routes(app: FastAPI, generator: Generator) -> None:
    @app.get("/v1/requests/{request_id}")
    async def request(request_id: str) -> Response:
        if choices := generator.requests.find_choices(request_id):
            told = {"id": request_id, "object": "list", "data": [r.as_dict() for r in choices]}
            return JsonResponse(told)
        return JsonResponse(generator.requests.find(request_id).as_dict())


def trace_headers(request: Request) -> dict[str, str]:
    """Returns the headers by which the client has the request in its own trace."""
    return {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}


def answer_headers(request: Request, request_id: str, delta: Delta) -> dict[str, str]:
    """Returns the headers of an answer whose last delta so far is `delta`."""
    headers = {"x-request-id": request_id}
    if asks(request.headers.get(PLACEMENT_HEADER)):
        headers[PLACEMENT_HEADER] = delta.placement
    if delta.timeline is not None and asks_timing(request):
        headers["server-timing"] = delta.timeline.server_timing()
    return headers


def asks_timing(request: Request) -> bool:
    return asks(request.headers.get(TIMING_HEADER))
