"""Runs a thread that a process cannot work without: if it fails, the process exits.

The process is then restarted: Ray restarts an agent, and the process that started Ray's head
restarts the pool controller. Otherwise the process would still run but do nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EXIT_STATUS = 1
# pause before the exit, so that a thread that always fails does not cause restarts all the time
_PAUSE_S = 1.0


def start_vital(name: str, run: Callable[[], None]) -> None:
    """Runs `run` in a daemon thread. If it raises, the process exits; if it returns, the process
    continues."""

    def watched() -> None:
        try:
            run()
        except Exception:
            log.exception("the thread %s failed; its process ends, and is started again", name)
            time.sleep(_PAUSE_S)
            os._exit(_EXIT_STATUS)

    threading.Thread(target=watched, name=name, daemon=True).start()
