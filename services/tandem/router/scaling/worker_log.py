"""Reads workers' logs for operators through a router, because workers may be on other machines."""

import asyncio
import os
from pathlib import Path

from tandem.errors import NotNow, WorkerLost, WorkerNotFound
from tandem.net.observability.log_file import FILE_VARIABLE, NO_FILE, LogPosition, read_piece
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import WorkerRecord
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.rows import host_of


async def read_worker_log(
    control: ClusterControl, worker_id: str, after: LogPosition
) -> tuple[bytes, LogPosition]:
    """Returns the text of a worker's log after the position `after`, and the position of its end.

    Raises WorkerNotFound, NotNow if the log is not a file, and WorkerLost if the worker does not
    answer. The message names the worker's host if it is known.
    """
    try:
        record = control.record(worker_id)
    except WorkerNotFound:
        if (gone := control.view.gone.get(worker_id)) is None:
            raise
        message = f"{worker_id} has ended, so it cannot send its log; {_place_of(gone.record)}"
        raise WorkerNotFound(message) from None
    try:
        reply = await control.call(record, "ReadLog", pb.ReadLogRequest(after=str(after)))
    except WorkerLost as error:
        raise WorkerLost(f"{error.message}; {_place_of(record)}") from error
    return reply.text, LogPosition.parse(reply.after)


async def read_own_log(after: LogPosition) -> tuple[bytes, LogPosition]:
    """Returns the text of this process's log after `after`, and the position of its end.

    Raises NotNow if the log is not a file.
    """
    if not (path := os.environ.get(FILE_VARIABLE)):
        raise NotNow(NO_FILE)
    return await asyncio.to_thread(read_piece, Path(path), after)


def _place_of(record: WorkerRecord) -> str:
    return f"its log is on host {host_of(record)}, where `tandem logs {record.worker_id}` prints it"
