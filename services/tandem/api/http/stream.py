"""Answers that end when their client does: a whole one and a stream of server-sent events.

Both listen to the connection while they wait, in every phase of the request: starlette's own
StreamingResponse would notice only when it sends, and a queued request sends nothing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.api.openai.choices import ChoiceDelta
from tandem.errors import TandemError
from tandem.router.request.delta import Delta

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MEASURED_MAX = 256  # tokens with log probabilities in what the event loop makes by itself


class ReplyFormat(Protocol):
    """The form of the answer to one body, in the words of one API."""

    @property
    def reply_id(self) -> str:
        """Returns the id that the client sees."""

    @property
    def num_choices(self) -> int:
        """Returns how many choices there are."""

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed, from all deltas of its choices."""

    def events(self, choice: int, delta: Delta) -> bytes:
        """Returns the events for a delta of a choice, or nothing."""

    def ending(self) -> bytes:
        """Returns the events after the last delta of all."""

    def failure(self, error: TandemError) -> bytes:
        """Returns the last event of a stream that an error ends."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits `work`; raises ClientDisconnect, after `work` was cancelled, when the client goes."""
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
    """Server-sent events of a generation whose first delta came, so that the status is known."""

    def __init__(
        self,
        first: ChoiceDelta,
        rest: AsyncGenerator[ChoiceDelta, None],
        replies: ReplyFormat,
        headers: Mapping[str, str],
        *,
        tells_timing: bool = False,
    ) -> None:
        """`tells_timing` adds a final comment with the timeline of the choice that ended last."""
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type="text/event-stream",
        )
        # An open stream has no length.
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._replies = replies
        self._tells_timing = tells_timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            log.debug("the client of %s is gone", self._replies.reply_id)
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = self._first
        await self._send_delta(send, last)
        try:
            async for last in self._rest:
                await self._send_delta(send, last)
            ending = self._replies.ending()
            if self._tells_timing and last.delta.timeline is not None:
                timing = f": server-timing: {last.delta.timeline.server_timing()}\n\n"
                ending = timing.encode() + ending
        except TandemError as error:
            ending = self._replies.failure(error)
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_delta(self, send: Send, came: ChoiceDelta) -> None:
        events = await _made([came.delta], partial(self._replies.events, *came))
        await send({"type": "http.response.body", "body": events, "more_body": True})


async def first_delta(request: Request, deltas: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta:
    """Waits for the first delta. Nothing is sent before, so a refusal still gets its own status."""
    try:
        return await until_disconnect(request.receive, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise


async def collect(
    deltas: AsyncGenerator[ChoiceDelta, None], replies: ReplyFormat
) -> tuple[dict[str, Any], Delta]:
    """Returns the body of an answer that is not streamed, and its last delta."""
    made: list[list[Delta]] = [[] for _ in range(replies.num_choices)]
    last: Delta | None = None
    async with aclosing(deltas):
        async for index, last in deltas:
            made[index].append(last)
    assert last is not None
    return await _made(chain(*made), partial(replies.whole, made)), last


async def _made(deltas: Iterable[Delta], make: Callable[[], _T]) -> _T:
    """Makes an answer of these deltas, in a thread if it has many log probabilities: half a million
    take a second, in which the event loop would serve nobody."""
    num_measured = sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)
    return await asyncio.to_thread(make) if num_measured > _MEASURED_MAX else make()
