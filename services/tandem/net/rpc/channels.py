"""Helpers for closing gRPC channels. One converts the errors of calls that are open when a channel
is closed. The other closes a channel from code that cannot await."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from tandem.errors import TandemError


@contextmanager
def foreign_cancellation_raises(error: TandemError) -> Iterator[None]:
    """Converts a CancelledError to `error`, unless the current task was cancelled.

    When a channel is closed, gRPC raises CancelledError in each task that awaits a call of the
    channel, although the task was not cancelled.
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
