"""Sends complete replies and event streams. If the client disconnects, the generation is cancelled.

A disconnect is noticed at any time. Starlette's own StreamingResponse is not used, because it
notices a disconnect only while it sends, and a request that waits in a queue sends nothing.
"""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.api.http.errors import hidden
from tandem.api.openai.choices import ChoiceDelta
from tandem.errors import TandemError
from tandem.router.request.delta import Delta

log = logging.getLogger(__name__)

_T = TypeVar("_T")
BeforeEnd = Callable[[], Awaitable[None]]
# A reply with more log probabilities than this is built in a thread, not in the event loop.
_MEASURED_MAX = 256
KEEP_ALIVE_S = 10.0
_EVENTS = "text/event-stream"


class ReplyFormat(Protocol):
    """Formats the reply to one request. Each API has a class with these methods."""

    @property
    def reply_id(self) -> str:
        """The id of the reply that the client sees."""

    @property
    def num_choices(self) -> int:
        """The number of choices in the reply."""

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Builds the complete body of a reply that is not streamed. `choices` has all deltas of
        each choice."""

    def events(self, choice: int, delta: Delta) -> bytes:
        """Encodes the events for one delta of a choice. Returns b"" if the delta needs no event."""

    def keep_alive(self) -> bytes:
        """Encodes what is sent while there is nothing to say."""

    def ending(self) -> bytes:
        """Encodes the bytes that are sent after the last delta of all choices."""

    def failure(self, error: TandemError) -> bytes:
        """Encodes the last event of a stream that ends early with an error."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`. If the client disconnects, cancels `work` and raises ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams a generation as server-sent events. The status is 200, because a worker has admitted
    the request when the response starts.

    After each KEEP_ALIVE_S seconds without an event, a comment or a ping is sent, because proxies
    and clients close connections that are silent.
    """

    def __init__(
        self,
        first: asyncio.Future[ChoiceDelta],
        rest: AsyncGenerator[ChoiceDelta, None],
        replies: ReplyFormat,
        headers: Mapping[str, str],
        *,
        with_timing: bool = False,
        before_end: BeforeEnd | None = None,
    ) -> None:
        """`first` yields the first delta, and `rest` the others. `before_end` is awaited before the
        events of the last delta are sent, and after they were built. `with_timing`: True if the
        stream ends with an SSE comment that has the timeline of the choice that ended last."""
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type=_EVENTS,
        )
        # The length of a stream is unknown.
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._replies = replies
        self._with_timing = with_timing
        self._before_end = before_end
        self._sent_at = 0.0  # time of the last event, on the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            log.debug("the client disconnected before the end of reply %s", self._replies.reply_id)
        finally:
            await _close(self._first, self._rest)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            ending = await self._send_deltas(send)
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_deltas(self, send: Send) -> bytes:
        """Sends the events of all deltas. Returns the end of the stream, which may be an error."""
        try:
            last = await self._first
            await self._send_delta(send, last)
            async for last in self._rest:
                await self._send_delta(send, last)
            ending = self._replies.ending()
            has_comments = self.headers["content-type"].startswith(_EVENTS)
            if self._with_timing and has_comments and last.delta.timeline is not None:
                timing = f": server-timing: {last.delta.timeline.server_timing()}\n\n"
                ending = timing.encode() + ending
            return ending
        except TandemError as error:
            return self._replies.failure(error)
        except Exception as error:
            log.exception("a stream ends with an internal error")
            return self._replies.failure(hidden(error))

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if (silent_s := loop.time() - self._sent_at) < KEEP_ALIVE_S:
                await asyncio.sleep(KEEP_ALIVE_S - silent_s)
            else:
                await self._send(send, self._replies.keep_alive())

    async def _send(self, send: Send, events: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_delta(self, send: Send, came: ChoiceDelta) -> None:
        events = await _build([came.delta], partial(self._replies.events, *came))
        if self._before_end is not None and came.delta.total is not None:
            await self._before_end()
        if events:
            await self._send(send, events)


async def begin_stream(
    request: Request,
    deltas: AsyncGenerator[ChoiceDelta, None],
    all_admitted: asyncio.Event | None,
) -> asyncio.Future[ChoiceDelta]:
    """Waits until workers have admitted the request, or for the first delta if it comes earlier or
    if `all_admitted` is None. Returns the future first delta.

    If the generation fails earlier, the error can still set the HTTP status, because nothing was
    sent to the client.
    """
    first = asyncio.ensure_future(anext(deltas))

    async def begin() -> None:
        awaited: list[asyncio.Future[Any]] = [first]
        if all_admitted is not None:
            awaited.append(asyncio.ensure_future(all_admitted.wait()))
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for admitted in awaited[1:]:
                admitted.cancel()
        if first.done():
            first.result()

    try:
        await until_disconnect(request.receive, begin())
    except BaseException:
        await _close(first, deltas)
        raise
    return first


async def _close(
    first: asyncio.Future[ChoiceDelta], rest: AsyncGenerator[ChoiceDelta, None]
) -> None:
    """Cancels a generation whose first delta may still be awaited."""
    if not first.done():
        first.cancel()
        await asyncio.wait([first])
    elif not first.cancelled():
        first.exception()  # Python reports errors that nobody has read.
    await rest.aclose()


async def collect(
    deltas: AsyncGenerator[ChoiceDelta, None], replies: ReplyFormat
) -> tuple[dict[str, Any], Delta]:
    """Collects all deltas. Returns the body of a reply that is not streamed, and the last delta."""
    made: list[list[Delta]] = [[] for _ in range(replies.num_choices)]
    last: Delta | None = None
    async with aclosing(deltas):
        async for index, last in deltas:
            made[index].append(last)
    assert last is not None
    return await _build(chain(*made), partial(replies.whole, made)), last


async def _build(deltas: Iterable[Delta], make: Callable[[], _T]) -> _T:
    """Calls `make`, which builds a reply from `deltas`. If the deltas have many log probabilities,
    `make` runs in a thread: formatting half a million takes a second, in which the event loop could
    do nothing else."""
    num_measured = sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)
    return await asyncio.to_thread(make) if num_measured > _MEASURED_MAX else make()
