"""Cancels tasks and waits until they have ended.

`asyncio.wait_for` in Python 3.11 loses a cancellation that arrives when the awaited call has just
ended (CPython issue 81839), and redis-py sends each command through `wait_for`. A loop that uses
Redis could so miss a cancellation and run for ever, and code that waits for the end of the loop
would hang.
"""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and returns when all have ended. Tasks that have not ended after 1 s are
    cancelled again.

    Errors of the tasks are not raised.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in left:
            log.warning(
                "the task %s still runs %g s after its cancellation; it is cancelled again",
                task.get_name(),
                _AGAIN_S,
            )
