"""Helpers for channels that are closed while calls are open, or without waiting."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from tandem.errors import TandemError


@contextmanager
def foreign_cancellation_raises(error: TandemError) -> Iterator[None]:
    """Raises `error` if the awaited call was cancelled, but not the task that awaits it.

    gRPC cancels the callers of open calls when their channel is closed.
    """
    try:
        yield
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise error from None


def close_soon(channel: grpc.aio.Channel) -> None:
    """Closes a channel from code that cannot await it."""
    closing = asyncio.ensure_future(channel.close(None))
    closing.add_done_callback(lambda task: task.cancelled() or task.exception())
