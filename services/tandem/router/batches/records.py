"""The records of files and batches, as the file store has them.

    TENANT/files/FILE            bytes of a file
    TENANT/records/FILE          `FileRecord`; the file exists if it has one
    TENANT/batches/BATCH         `BatchRecord`; the batch exists if it has one
    TENANT/logs/BATCH/NUMBER     the batch's log (log.py)
    TENANT/ends/BATCH            `BatchEnd`, once the batch has ended
    open/BATCH.TENANT            empty; exists until the batch has ended
    runner/NUMBER, runner/beat   the router that runs batches (leader.py)
    sweeps/NUMBER                empty; a router has swept in this quarter of an hour (sweep.py)

TENANT is a digest of the tenant's name. A name in the store is always built from the tenant of the
call, so no tenant reaches another one's objects. Records never change.
"""

import re
import secrets
import time
from hashlib import blake2b
from typing import Literal

import msgspec

from tandem.net.security.limits import NO_LIMITS, Limits

OPEN = "open"
SWEEPS = "sweeps"
Purpose = Literal["batch", "batch_output"]
_FILE_ID = re.compile("file-[0-9a-f]{32}")
_BATCH_ID = re.compile("batch_[0-9a-f]{32}")
_ID_BYTES = 16


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    file_id: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: float  # seconds since the epoch, like all times here
    expires_at: float


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for. `limits` are those of the client's API key when it made the
    batch."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    window_ends_at: float  # lines that have not ended by then expire
    expires_at: float  # the batch's records are deleted then
    output_expires_s: float
    metadata: dict[str, str] | None = None
    limits: Limits = NO_LIMITS


class LineError(msgspec.Struct, frozen=True):
    """Why a batch failed before its first line ran. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a batch, and what a client may still ask about it."""

    status: Literal["completed", "failed", "expired", "cancelled"]
    begun_at: float = 0.0
    cancelling_at: float = 0.0
    finalizing_at: float = 0.0
    ended_at: float = 0.0
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()


def tenant_folder(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=_ID_BYTES).hexdigest()


def new_file_id() -> str:
    return f"file-{secrets.token_hex(_ID_BYTES)}"


def new_batch_id() -> str:
    """Returns an id that is greater than all older ones of this clock, so that ids sort by age."""
    return f"batch_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def new_request_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def result_file_id(batch_id: str, part: Literal["output", "error"]) -> str:
    """Returns the id of a batch's result file. Each router that ends the batch writes this file."""
    digest = blake2b(f"{batch_id} {part}".encode(), digest_size=_ID_BYTES)
    return f"file-{digest.hexdigest()}"


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None


def file_name(tenant: str, file_id: str) -> str:
    return f"{tenant_folder(tenant)}/files/{file_id}"


def file_record_name(tenant: str, file_id: str) -> str:
    return f"{tenant_folder(tenant)}/records/{file_id}"


def batch_record_name(folder: str, batch_id: str) -> str:
    return f"{folder}/batches/{batch_id}"


def batch_end_name(tenant: str, batch_id: str) -> str:
    return f"{tenant_folder(tenant)}/ends/{batch_id}"


def log_prefix(tenant: str, batch_id: str) -> str:
    return f"{tenant_folder(tenant)}/logs/{batch_id}"


def open_name(tenant: str, batch_id: str) -> str:
    return f"{OPEN}/{batch_id}.{tenant_folder(tenant)}"
