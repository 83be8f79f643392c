"""A thread without which its actor is of no use: when it breaks, the actor's process ends.

Ray then starts the actor again. An actor that had lost its thread would answer Ray for ever, and do
nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EXIT_STATUS = 1
_PAUSE_S = 1.0  # before the end: what broke it may break the next one at once


def start_vital(name: str, run: Callable[[], None]) -> None:
    """Starts `run` in a daemon thread. The process goes on if it returns, and ends if it raises."""

    def watched() -> None:
        try:
            run()
        except Exception:
            log.exception("%s broke; its actor ends, and Ray starts it again", name)
            time.sleep(_PAUSE_S)
            os._exit(_EXIT_STATUS)

    threading.Thread(target=watched, name=name, daemon=True).start()
