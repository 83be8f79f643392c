"""Channels that are closed under their calls, and closed without waiting for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from tandem.errors import TandemError


@contextmanager
def foreign_cancellation_raises(error: TandemError) -> Iterator[None]:
    """Raises `error` when what is awaited inside was cancelled, and not the task that awaits it.

    gRPC cancels the caller of a call whose channel is closed.
    """
    try:
        yield
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise error from None


def close_soon(channel: grpc.aio.Channel) -> None:
    """Closes a channel from code that cannot wait for it."""
    closing = asyncio.ensure_future(channel.close(None))
    closing.add_done_callback(lambda task: task.cancelled() or task.exception())
