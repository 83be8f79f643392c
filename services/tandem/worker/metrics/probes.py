"""Answers Kubernetes' probes of a worker on the port of its metrics.

    path      answer
    /health   200; 503 if the event loop hangs
    /ready    200 while the worker accepts requests; 503 before and during the drain

The threads that serve metrics also answer probes. So a probe is answered even if the event loop
hangs. The worker itself kills a hung engine (`EngineWatch`) and then exits. Every `ASK_INTERVAL_S`
seconds, the engine gets a command that it must answer. So a hang of an idle engine is detected
before the next request arrives.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from tandem.common.process.ticks import sleep_until_tick
from tandem.net.bounded_server import WsgiApp

LOOP_HANG_S = 15.0
ASK_INTERVAL_S = 10.0
_TURN_S = 1.0


class Probes:
    """Answers probes. `turn_for_ever` runs on the event loop. The other methods may run in any
    thread.
    """

    def __init__(self, state: Callable[[], str], ask_engine: Callable[[], None]) -> None:
        """`ask_engine` makes an idle engine send one report."""
        self._state = state
        self._ask_engine = ask_engine
        self._turned_at = time.monotonic()

    async def turn_for_ever(self) -> None:
        reported_at = time.monotonic()
        while True:
            await sleep_until_tick(_TURN_S)
            self._turned_at = time.monotonic()
            if self._turned_at - reported_at >= ASK_INTERVAL_S:
                reported_at = self._turned_at
                self._ask_engine()

    def unhealthy_reason(self) -> str:
        """Returns why the process is unhealthy; "" if it is healthy."""
        stands_s = time.monotonic() - self._turned_at
        return (
            f"the event loop has been blocked for {stands_s:.0f} s"
            if stands_s > LOOP_HANG_S
            else ""
        )

    def not_ready_reason(self) -> str:
        """Returns why the worker accepts no requests; "" if it accepts requests."""
        state = self._state()
        return "" if state == "ready" else f"the worker is {state}"

    def around(self, metrics: WsgiApp) -> WsgiApp:
        """Returns a WSGI application that answers probes and passes other paths to `metrics`."""

        def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            match environ["PATH_INFO"]:
                case "/health":
                    reason = self.unhealthy_reason()
                case "/ready":
                    reason = self.not_ready_reason()
                case _:
                    return metrics(environ, start_response)
            status = "503 Service Unavailable" if reason else "200 OK"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{reason or 'ok'}\n".encode()]

        return app
