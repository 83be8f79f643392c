"""Cancels tasks until they are over.

`asyncio.wait_for` of Python 3.11 drops a cancellation that comes just when what it awaits has ended
(CPython issue 81839), and redis-py sends each command through it. A loop that talks to Redis would
then go on for ever, and whoever awaits its end would stand still.
"""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Returns when the tasks are over. One that goes on for 1 s is cancelled once more.

    Raises nothing that they raise.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
        for task in left:
            log.warning("%s goes on after its cancellation; once more", task.get_name())
