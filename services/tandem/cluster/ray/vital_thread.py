"""A thread that its actor cannot do without: when it fails, the actor's process ends.

Ray then restarts the actor. An actor without its thread would answer Ray for ever and do nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EXIT_STATUS = 1
_PAUSE_S = 1.0  # before the end, because the next thread may fail at once, too


def start_vital(name: str, run: Callable[[], None]) -> None:
    """Starts `run` in a daemon thread. The process continues if it returns, ends if it raises."""

    def watched() -> None:
        try:
            run()
        except Exception:
            log.exception("%s broke; its actor ends, and Ray starts it again", name)
            time.sleep(_PAUSE_S)
            os._exit(_EXIT_STATUS)

    threading.Thread(target=watched, name=name, daemon=True).start()
