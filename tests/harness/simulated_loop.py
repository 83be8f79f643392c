"""An event loop whose clock is set by the test, so that deadlines expire exactly when the test
decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only by `advance`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.errors: list[str] = []
        self.set_exception_handler(lambda _, context: self.errors.append(str(context)))

    def call(self, action: Callable[[], None]) -> None:
        """Runs `action` in the loop, like code of the services, and then everything that becomes
        ready."""

        async def run() -> None:
            action()

        self.run_until_complete(run())
        self.settle()

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Runs until everything waits for a message or the clock."""
        for _ in range(1000):
            self.call_soon(self.stop)
            self.run_forever()
            if not self._ready:  # type: ignore[attr-defined]
                assert not self.errors, self.errors
                return
        raise AssertionError("the services never come to rest")

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.settle()
