"""Routes of OpenAI's files API. A file is streamed from the client to the file store, so the router
never holds more than a piece of it."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from tandem.api.http.body import DISCARD_BYTES_MAX
from tandem.api.http.errors import JsonResponse
from tandem.api.http.multipart import Multipart, Part
from tandem.api.openai.batches import EXPIRE_S_MAX, EXPIRE_S_MIN, file_object
from tandem.api.openai.paging import page_of
from tandem.api.routes.generation import GenerationRoutes
from tandem.errors import (
    BadRequest,
    BodyTooLate,
    FileTooLarge,
    NotNow,
    TandemError,
    TooManyRequests,
    UnknownCoding,
)
from tandem.router.batches.files import FILES_MAX, Files
from tandem.router.batches.records import FileRecord
from tandem.router.batches.shelf import Batches

FILES_PATH = "/v1/files"
UPLOADS_MAX = 16  # at the same time, of all tenants
_ENVELOPE_BYTES = 64 << 10  # the body may be larger than the file by this much
_FIELD_BYTES_MAX = 1 << 10
_BYTES_PER_S_MIN = 64 << 10  # an upload that is slower than this is refused
_NAME_CHARACTERS_MAX = 255
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_UPLOAD: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file", "purpose"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "purpose": {"type": "string", "enum": ["batch"]},
                            "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                            "expires_after[seconds]": {"type": "integer"},
                        },
                    }
                }
            },
            "required": True,
        }
    }
}


def add_file_routes(app: FastAPI, routes: GenerationRoutes, files: Files, batches: Batches) -> None:
    """Adds the routes under /v1/files."""
    uploads = UploadPlaces(UPLOADS_MAX)

    @app.post(FILES_PATH, **_UPLOAD)
    async def upload(request: Request) -> Response:
        """Uploads a file for a batch."""
        tenant = routes.tenant(request)
        with uploads.place(tenant):
            body = _Body(request, files.file_bytes_max, routes.config.body_deadline_s)
            try:
                record = await _receive(_Upload(body, request), files, tenant)
            except TandemError:
                # The client reads the answer only after it has sent its body.
                await body.discard()
                raise
        return JsonResponse(file_object(record))

    @app.get(FILES_PATH)
    async def list_files(request: Request) -> Response:
        """Lists the files, page by page."""
        purpose = request.query_params.get("purpose")
        found = await files.of_tenant(routes.tenant(request))
        items = [file_object(each) for each in found if purpose in (None, each.purpose)]
        return JsonResponse(
            page_of(items, request.query_params, what="a file", default=FILES_MAX, most=FILES_MAX)
        )

    @app.get(f"{FILES_PATH}/{{file_id}}")
    async def retrieve(file_id: str, request: Request) -> Response:
        """Describes a file."""
        return JsonResponse(file_object(await files.find(routes.tenant(request), file_id)))

    @app.get(f"{FILES_PATH}/{{file_id}}/content")
    async def content(file_id: str, request: Request) -> Response:
        """Returns the bytes of a file."""
        tenant = routes.tenant(request)
        record = await files.find(tenant, file_id)
        return StreamingResponse(
            files.content(tenant, record),
            headers={"content-length": str(record.num_bytes)},
            media_type="application/octet-stream",
        )

    @app.delete(f"{FILES_PATH}/{{file_id}}")
    async def delete(file_id: str, request: Request) -> Response:
        """Deletes a file."""
        tenant = routes.tenant(request)
        await files.find(tenant, file_id)
        if batch_id := await batches.uses(tenant, file_id):
            raise NotNow(
                f"the file {file_id} is the input of {batch_id}, which has not ended; cancel the "
                "batch first"
            )
        await files.delete(tenant, file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})


class UploadPlaces:
    """The places of uploads, of which no tenant can take all.

    A tenant may have at most as many places as are left free. So one tenant alone gets half of
    them, two tenants get a third each, and a place is left for the next tenant.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._taken: Counter[str] = Counter()  # by tenant

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Holds a place during the `with` block. Raises TooManyRequests if the tenant gets none."""
        num_free = self._num_places - self._taken.total()
        if self._taken[tenant] >= num_free:
            raise TooManyRequests(
                f"this router receives {self._taken[tenant]} of your files and "
                f"{self._taken.total()} in all; try again later",
                retry_after_s=5.0,
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # drops tenants without uploads


class _Body:
    """The bytes of an upload, within limits on size and time."""

    def __init__(self, request: Request, file_bytes_max: int, deadline_s: float) -> None:
        self._stream = request.stream()
        self._file_bytes_max = file_bytes_max
        self._deadline_s = deadline_s
        self._began = asyncio.get_running_loop().time()
        self._num_bytes = 0
        length = request.headers.get("content-length", "")
        self._length = int(length) if re.fullmatch("[0-9]{1,18}", length) else 0

    def check_length(self) -> None:
        """Raises FileTooLarge if the client announces a body that is too large."""
        if self._length > self._file_bytes_max + _ENVELOPE_BYTES:
            raise FileTooLarge(
                f"a file may have at most {self._file_bytes_max} bytes", param="file"
            )

    async def read(self) -> bytes | None:
        """Returns the next bytes, or None at the end. Raises BodyTooLate and FileTooLarge."""
        given_s = self._deadline_s + self._num_bytes / _BYTES_PER_S_MIN
        try:
            async with asyncio.timeout_at(self._began + given_s):
                data = await anext(self._stream, None)
        except TimeoutError:
            raise BodyTooLate(
                f"the file did not arrive in time; after {self._deadline_s:g} s, at least "
                f"{_BYTES_PER_S_MIN} bytes each second must arrive"
            ) from None
        if data is not None:
            self._num_bytes += len(data)
            if self._num_bytes > self._file_bytes_max + _ENVELOPE_BYTES:
                raise FileTooLarge(
                    f"a file may have at most {self._file_bytes_max} bytes", param="file"
                )
        return data

    async def discard(self) -> None:
        """Reads and drops the rest, up to a limit."""
        end = self._num_bytes + DISCARD_BYTES_MAX
        try:
            async with asyncio.timeout(self._deadline_s):
                async for data in self._stream:
                    self._num_bytes += len(data)
                    if self._num_bytes > end:
                        return
        except (TimeoutError, RuntimeError):
            return


class _Upload:
    """The form of an upload: the fields, and the bytes of the file as they arrive."""

    def __init__(self, body: _Body, request: Request) -> None:
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise UnknownCoding("a file must be sent without Content-Encoding")
        body.check_length()
        self._body = body
        self._form = Multipart(request.headers.get("content-type", ""))
        self._pending: list[Part | bytes] = []
        self.fields: dict[str, str] = {}

    async def to_file(self) -> str | None:
        """Reads the fields before the file. Returns the file's name; None if there is no file."""
        return await self._read_fields(None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the bytes of the file, after which `rest` may follow."""
        while (item := await self._next()) is not None:
            if isinstance(item, Part):
                self._pending.insert(0, item)
                return
            yield item

    async def rest(self) -> None:
        """Reads the fields after the file. Raises BadRequest for a second file."""
        if await self._read_fields(None) is not None:
            raise BadRequest("send one file, not several", param="file")

    async def _read_fields(self, name: str | None) -> str | None:
        held = bytearray()
        while True:
            item = await self._next()
            if not isinstance(item, bytes) and name is not None:
                self.fields[name] = held.decode("utf-8", "replace")
            if item is None:
                self._form.check_end()
                return None
            if isinstance(item, Part):
                if item.name == "file":
                    return item.filename or ""
                if item.name not in _FIELDS:
                    raise BadRequest(
                        f"the field {item.name[:80]!r} is unknown; allowed are: file, "
                        + ", ".join(_FIELDS),
                        param=item.name[:80],
                    )
                name, held = item.name, bytearray()
                continue
            held += item
            if len(held) > _FIELD_BYTES_MAX:
                raise BadRequest(f"the field {name} is too long", param=name)

    async def _next(self) -> Part | bytes | None:
        while not self._pending:
            if (data := await self._body.read()) is None:
                return None
            self._pending = list(self._form.push(data))
        return self._pending.pop(0)


async def _receive(upload: _Upload, files: Files, tenant: str) -> FileRecord:
    if (filename := await upload.to_file()) is None:
        raise BadRequest("the form has no file", param="file")
    if "purpose" in upload.fields:
        _check_purpose(upload.fields)
    file_id, num_bytes = await files.receive(tenant, upload.pieces())
    try:
        await upload.rest()
        _check_purpose(upload.fields)
        expire_s = _expire_s(upload.fields, files.expire_s)
        return await files.add(
            tenant,
            file_id,
            filename=filename[:_NAME_CHARACTERS_MAX] or "file",
            purpose="batch",
            num_bytes=num_bytes,
            expire_s=expire_s,
        )
    except BaseException:
        await files.discard(tenant, file_id)
        raise


def _check_purpose(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose")
    if purpose != "batch":
        given = "is missing" if purpose is None else f"is {purpose[:80]!r}"
        raise BadRequest(
            f"purpose {given}; it must be batch, because files serve no other purpose here",
            param="purpose",
        )


def _expire_s(fields: dict[str, str], default_s: float) -> float:
    anchor, seconds = (fields.get(name) for name in _FIELDS[1:])
    if anchor is None and seconds is None:
        return default_s
    is_number = seconds is not None and re.fullmatch("[0-9]{1,9}", seconds)
    if anchor != "created_at" or not is_number or not seconds:
        raise BadRequest(
            "expires_after must have the anchor created_at and a number of seconds",
            param="expires_after",
        )
    if not EXPIRE_S_MIN <= int(seconds) <= EXPIRE_S_MAX:
        raise BadRequest(
            f"expires_after[seconds] must be from {EXPIRE_S_MIN} to {EXPIRE_S_MAX}",
            param="expires_after",
        )
    return min(default_s, float(seconds))
