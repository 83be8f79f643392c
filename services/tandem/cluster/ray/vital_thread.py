"""Runs a thread that a Ray actor cannot work without: if it fails, the actor's process exits.

Ray then restarts the actor. Otherwise the actor would still answer Ray but do nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_EXIT_STATUS = 1
# pause before the exit, so that a thread that always fails does not restart its actor all the time
_PAUSE_S = 1.0


def start_vital(name: str, run: Callable[[], None]) -> None:
    """Runs `run` in a daemon thread. If it raises, the process exits; if it returns, the process
    continues."""

    def watched() -> None:
        try:
            run()
        except Exception:
            log.exception("the thread %s failed; its Ray actor ends, and Ray restarts it", name)
            time.sleep(_PAUSE_S)
            os._exit(_EXIT_STATUS)

    threading.Thread(target=watched, name=name, daemon=True).start()
