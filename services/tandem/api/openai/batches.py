"""Request bodies and replies of OpenAI's files and batches APIs."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

from pydantic import Field

from tandem.api.openai.fields import FieldPolicy
from tandem.api.openai.structured import Strict
from tandem.errors import BadRequest
from tandem.net.security.limits import Limits
from tandem.router.batches.lines import ENDPOINTS
from tandem.router.batches.records import BatchRecord, FileRecord, new_batch_id
from tandem.router.batches.shelf import BatchView

EXPIRE_S_MIN, EXPIRE_S_MAX = 3600, 30 * 24 * 3600  # as in OpenAI's API
_METADATA_MAX, _KEY_MAX, _VALUE_MAX = 16, 64, 512
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}
_WINDOW = re.compile("([1-9][0-9]{0,4})([mhd])")
_WINDOW_S_MAX = EXPIRE_S_MAX
_ALLOWED = {
    "input_file_id": "the id of a file that was uploaded with the purpose batch",
    "endpoint": f"one of {', '.join(ENDPOINTS)}",
    "completion_window": "24h, or another time of at most 30d, such as 90m, 6h or 7d",
    "metadata": f"an object of at most {_METADATA_MAX} strings, with names of at most {_KEY_MAX} "
    f"and values of at most {_VALUE_MAX} characters",
    "output_expires_after": f'an object {{"anchor": "created_at", "seconds": N}} with N from '
    f"{EXPIRE_S_MIN} to {EXPIRE_S_MAX}",
}


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRE_S_MIN, le=EXPIRE_S_MAX)


class BatchBody(Strict):
    """The body of `POST /v1/batches`."""

    field_policy = FieldPolicy()
    allowed = _ALLOWED

    input_file_id: str = Field(description=_ALLOWED["input_file_id"])
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description=_ALLOWED["endpoint"])
    completion_window: str = Field(description=_ALLOWED["completion_window"])
    metadata: dict[str, str] | None = Field(None, description=_ALLOWED["metadata"])
    output_expires_after: ExpiresAfter | None = Field(
        None, description=_ALLOWED["output_expires_after"]
    )

    def to_record(self, tenant: str, limits: Limits, expire_s: float) -> BatchRecord:
        """Builds the record of a new batch. `expire_s`: files and batches are kept so long. Raises
        BadRequest."""
        now = time.time()
        metadata = self.metadata or {}
        if len(metadata) > _METADATA_MAX or any(
            len(name) > _KEY_MAX or len(value) > _VALUE_MAX for name, value in metadata.items()
        ):
            raise _wrong("metadata")
        window_s = _window_s(self.completion_window)
        output_s = expire_s
        if self.output_expires_after is not None:
            output_s = min(expire_s, self.output_expires_after.seconds)
        return BatchRecord(
            batch_id=new_batch_id(),
            tenant=tenant,
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            created_at=now,
            window_ends_at=now + window_s,
            expires_at=now + max(expire_s, window_s),
            output_expires_s=output_s,
            metadata=self.metadata,
            limits=limits,
        )


def _window_s(text: str) -> float:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _WINDOW_S_MAX:
        raise _wrong("completion_window")
    return seconds


def _wrong(name: str) -> BadRequest:
    return BadRequest(f"{name} is not valid; it must be {_ALLOWED[name]}", param=name)


def file_object(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(view: BatchView) -> dict[str, Any]:
    record, end = view.record, view.end
    ended_at = {view.status: _time(end.ended_at)}
    errors = [
        {"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in end.errors
    ]
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": view.status,
        "output_file_id": end.output_file_id,
        "error_file_id": end.error_file_id,
        "created_at": int(record.created_at),
        "in_progress_at": _time(end.begun_at),
        "expires_at": int(record.window_ends_at),
        "finalizing_at": _time(end.finalizing_at),
        "completed_at": ended_at.get("completed"),
        "failed_at": ended_at.get("failed"),
        "expired_at": ended_at.get("expired"),
        "cancelling_at": _time(end.cancelling_at),
        "cancelled_at": ended_at.get("cancelled"),
        "request_counts": {
            "total": end.total,
            "completed": end.completed,
            "failed": end.failed,
        },
        "metadata": record.metadata,
    }


def _time(seconds: float) -> int | None:
    return int(seconds) if seconds else None
