"""Answers the call `ReadLog` of a worker."""

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc

from tandem.net.observability.log_file import FILE_VARIABLE, NO_FILE, LogPosition, read_piece
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb


async def read_log(request: pb.ReadLogRequest, context: Any) -> pb.ReadLogResponse:
    """Returns the next part of this process's log. Ends the call with FAILED_PRECONDITION if the
    log is no file of its own."""
    if not (path := os.environ.get(FILE_VARIABLE, "")):
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NO_FILE)
    text, after = await asyncio.to_thread(read_piece, Path(path), LogPosition.parse(request.after))
    return pb.ReadLogResponse(text=text, after=str(after))
