"""Clients that request short completions at a steady rate, and measure the time of each answer."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from dataclasses import dataclass, field

ADDRESSES = ("127.0.0.1", "127.0.0.3")
_BODY = b'{"prompt": "x", "max_tokens": 1}'
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_REQUESTS_OF_A_CONNECTION = 5
_ANSWER_S_MAX = 30.0


@dataclass
class GoodClients:
    """`number` clients with one request every `interval_s` each, alternating between two addresses.

    Every fifth request of a client uses a new connection, whose opening is included in its time.
    """

    port: int
    number: int = 200
    interval_s: float = 4.0
    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Sends requests for this number of seconds."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._ask_until(end, number) for number in range(self.number)))

    def percentile_ms(self, part: float) -> float:
        """A percentile of the measured times in ms; `part` is for example 0.99."""
        times = sorted(self.times_s)
        return times[min(len(times) - 1, int(part * len(times)))] * 1000

    async def _ask_until(self, end: float, number: int) -> None:
        due = time.monotonic() + self.interval_s * number / self.number
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for count in itertools.count(number):
            if due >= end:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due + self.interval_s, time.monotonic())
            started = time.perf_counter()
            try:
                async with asyncio.timeout(_ANSWER_S_MAX):
                    if streams is None or count % _REQUESTS_OF_A_CONNECTION == 0:
                        if streams is not None:
                            streams[1].close()
                        source = (ADDRESSES[number % len(ADDRESSES)], 0)
                        streams = await asyncio.open_connection(
                            "127.0.0.1", self.port, local_addr=source
                        )
                    await _ask(*streams)
                self.times_s.append(time.perf_counter() - started)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self.failures.append(repr(error))
                streams = None
        if streams is not None:
            streams[1].close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends one request. Raises ValueError if the status is not 200."""
    writer.write(_REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if not head.startswith(b"HTTP/1.1 200 ") or length is None:
        raise ValueError(head.partition(b"\r\n")[0].decode())
    await reader.readexactly(int(length[1]))
