"""Routes of OpenAI's batches API, and the calls that lines of batches make.

A line takes the way of an HTTP request, but inside this process: `LineCalls` calls an app that has
only the routes of generations, with the tenant and the limits of the batch. So a line is checked
and answered as a request of its own would be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message

from tandem.api.http.errors import JsonResponse, hidden, install_handlers
from tandem.api.openai.batches import BatchBody, batch_object
from tandem.api.openai.errors import error_body
from tandem.api.openai.openapi import body_route
from tandem.api.openai.paging import limit_of, list_reply
from tandem.api.openai.requests import validate
from tandem.api.routes.generation import GenerationRoutes
from tandem.api.served_model import ServedModel
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest, NotServed, TandemError
from tandem.net.files.store import FileStore
from tandem.net.security.body_budget import BodyBudget
from tandem.net.security.keys import KeyRecord
from tandem.router.admission.tenants import limits_of
from tandem.router.batches.files import Files
from tandem.router.batches.gate import Gate
from tandem.router.batches.runner import BatchRunner, LineAnswer, LineCall
from tandem.router.batches.shelf import Batches
from tandem.router.batches.spare import OpenLines, is_short, may_start
from tandem.router.request.generator import Generator
from tandem.router.request.models import Models
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

_PATH = "/v1/batches"
_ADDRESS = "batch"  # where lines come from, in the accounts of bodies
_UNBOUNDED = 1 << 50  # the runner bounds the number of its lines
# Lines under way for a model without decode workers. They wait in the dispatcher and let the
# autoscaler start a worker. More lines would fill the queue in which interactive requests wait.
UNSERVED_LINES_MAX = 4


def add_batch_routes(
    app: FastAPI, routes: GenerationRoutes, files: Files, batches: Batches
) -> None:
    """Adds the routes under /v1/batches."""

    @app.post(_PATH, **body_route(BatchBody))
    async def create(request: Request) -> Response:
        """Creates a batch of the lines of a file."""
        sent, headers = await routes.read(request, BatchBody)
        tenant = routes.tenant(request)
        body = validate(BatchBody, sent)
        record = body.to_record(tenant, limits_of(request.state.key), files.expire_s)
        file = await files.find(tenant, body.input_file_id)
        if file.purpose != "batch":
            raise BadRequest(
                f"the file {file.file_id} has the purpose {file.purpose}; it must be batch",
                param="input_file_id",
            )
        return JsonResponse(batch_object(await batches.create(record)), headers=headers)

    @app.get(_PATH)
    async def list_batches(request: Request) -> Response:
        """Lists the batches, newest first, page by page."""
        limit = limit_of(request.query_params, default=20, most=100)
        after = request.query_params.get("after")
        found, has_more = await batches.page(routes.tenant(request), after, limit)
        return JsonResponse(list_reply([batch_object(v) for v in found], has_more=has_more))

    @app.get(f"{_PATH}/{{batch_id}}")
    async def retrieve(batch_id: str, request: Request) -> Response:
        """Describes a batch."""
        return JsonResponse(batch_object(await batches.find(routes.tenant(request), batch_id)))

    @app.post(f"{_PATH}/{{batch_id}}/cancel")
    async def cancel(batch_id: str, request: Request) -> Response:
        """Cancels a batch. Lines that have a result keep it."""
        return JsonResponse(batch_object(await batches.cancel(routes.tenant(request), batch_id)))


def add_refusals(app: FastAPI, *, has_files: bool) -> None:
    """Adds routes that say why a part of OpenAI's API is not served."""

    @app.post("/v1/moderations", include_in_schema=False)
    async def moderations() -> Response:
        raise NotServed(
            "/v1/moderations is not served, because this server has no moderation model; use a "
            "moderation service, or a chat with a model that classifies texts"
        )

    if has_files:
        return

    async def no_files(path: str = "") -> Response:
        raise NotServed(
            "this cluster keeps no files, so it serves neither /v1/files nor /v1/batches; set "
            "--files-url to a folder that all routers share, or to s3://BUCKET/PREFIX"
        )

    for path in ("/v1/files", "/v1/files/{path:path}", _PATH, _PATH + "/{path:path}"):
        app.add_api_route(
            path, no_files, methods=["GET", "POST", "DELETE"], include_in_schema=False
        )


class _LinesOfModel:
    """The lines of batches for one model. It is the `SpareCapacity` of the model's dispatcher."""

    def __init__(
        self, generator: Generator, view: ClusterView, gate: Gate, num_early: Callable[[], int]
    ) -> None:
        """`num_early` counts the lines that have started, but whose requests are not open yet."""
        self._generator = generator
        self._num_early = num_early
        self._view = view
        self._gate = gate
        self._num_aside = 0  # lines that have stopped for other requests
        self._num_calls = 0  # lines under way, without those in `num_held`
        self._changed = asyncio.Event()  # replaced at each change, because several lines wait
        self.num_held = 0  # lines that have started and wait in `call` for a decode worker
        view.listen(self._notify)

    @property
    def num_running(self) -> int:
        return self._generator.lines.num_running

    @property
    def is_served(self) -> bool:
        return not self._generator.not_ready_reason()

    def is_short(self) -> bool:
        return is_short(self._view.snapshots(), self._open_lines())

    def may_start(self) -> bool:
        return may_start(self._view.snapshots(), self._open_lines())

    async def wait(self) -> None:
        self._num_aside += 1
        self._gate.notify()
        try:
            await self._gate.turn()
        finally:
            self._num_aside -= 1

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """A line of the model is under way in the `with` block.

        While the model has no decode worker, the block of a line begins only if fewer than
        `UNSERVED_LINES_MAX` lines are under way. A line that has waited takes another turn at the
        gate when the model is served.
        """
        while not self._view.has_decode_worker() and self._num_calls >= UNSERVED_LINES_MAX:
            self.num_held += 1
            self._gate.notify()
            try:
                await self._changed.wait()
                if self._view.has_decode_worker():
                    await self._gate.turn()
            finally:
                self.num_held -= 1
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _open_lines(self) -> OpenLines:
        generator = self._generator
        # The models of early lines are not known yet, so they count for every model.
        early = self._num_early()
        return OpenLines(
            num_lines=generator.lines.num_running + early - self._num_aside,
            num_lines_waiting=generator.lines.num_waiting + early,
        )


class BatchService:
    """What one router needs for files and batches."""

    def __init__(
        self, config: RouterConfig, store: FileStore, served: Sequence[ServedModel]
    ) -> None:
        options = config.files
        self.store = store
        self.files = Files(
            store,
            expire_s=options.files_expire_s,
            file_bytes_max=options.file_bytes_max,
            tenant_bytes_max=options.tenant_bytes_max,
        )
        self._gate = Gate(self._may_start)
        self._models: dict[Generator, _LinesOfModel] = {}
        for each in served:
            lines = _LinesOfModel(each.generator, each.view, self._gate, self._num_early)
            each.dispatcher.spare = lines
            each.view.listen(self._gate.notify)
            self._models[each.generator] = lines
        self.runner = BatchRunner(
            store, self.files, self._gate, _no_call, body_bytes_max=config.body_bytes_max
        )
        self.batches = Batches(store, self.runner.notify)

    def _may_start(self) -> bool:
        """Returns whether a line may start. Its model is not known yet, so all models that are
        served must have spare capacity."""
        served = [each for each in self._models.values() if each.is_served]
        return bool(served) and all(each.may_start() for each in served)

    def line_of(self, generator: Generator) -> AbstractAsyncContextManager[None]:
        """Returns the context in which a line of this model runs (`_LinesOfModel.call`)."""
        return self._models[generator].call()

    def _num_early(self) -> int:
        known = sum(each.num_running + each.num_held for each in self._models.values())
        return max(0, self._gate.num_lines - known)


async def _no_call(_: LineCall) -> LineAnswer:
    raise AssertionError("the app has not been built")


class LineCalls:
    """Calls the routes of generations for lines of batches."""

    def __init__(
        self, add_routes: Callable[[FastAPI], None], models: Models, service: BatchService
    ) -> None:
        """`add_routes` adds the routes that lines may call to an app."""
        self._models = models
        self._service = service
        self._app = FastAPI(openapi_url=None)
        install_handlers(self._app)
        add_routes(self._app)
        self._bodies = BodyBudget(_UNBOUNDED, _UNBOUNDED)

    async def __call__(self, call: LineCall) -> LineAnswer:
        """Returns the answer to a line. Cancelling the call cancels the generation."""
        record = call.record
        body = call.body
        if record.endpoint == "/v1/responses":
            # Thousands of responses would push those of interactive clients out of the cluster.
            body = {"store": False, **body}
        data = msgspec.json.encode(body)
        key = KeyRecord(
            key_id="",
            version=1,
            tenant=record.tenant,
            role="user",
            digest="",
            created_at=record.created_at,
            limits=record.limits,
        )
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": record.endpoint,
            "raw_path": record.endpoint.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": (_ADDRESS, 0),
            "server": (_ADDRESS, 0),
            "state": {
                "request_id": call.request_id,
                "client_id": record.batch_id,
                "key": key,
                "address": _ADDRESS,
                "bodies": self._bodies,
                "is_batch": True,
            },
        }
        messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        status = 500
        headers: dict[bytes, bytes] = {}
        answer = bytearray()

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # the line stays until it is cancelled
            return messages.pop()

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                answer.extend(message.get("body", b""))

        try:
            async with self._line(call):
                await self._app(scope, receive, send)
        except Exception as error:  # a bug, to which the app has answered already
            log.exception("a line of batch %s failed", record.batch_id)
            if not answer:
                answer += msgspec.json.encode(error_body(hidden(error)))
        retry_after = headers.get(b"retry-after", b"").decode()
        return LineAnswer(
            status, bytes(answer), float(retry_after) if retry_after.isdecimal() else None
        )

    def _line(self, call: LineCall) -> AbstractAsyncContextManager[None]:
        """Returns the context in which the line runs. A line whose model is unknown waits for
        nothing, because the app refuses it."""
        name = call.body.get("model") or ""
        try:
            return self._service.line_of(self._models.of(str(name), call.record.limits))
        except TandemError:
            return nullcontext()
