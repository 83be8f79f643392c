"""Runs the checks of one client library, and says of each whether it passed.

It needs only the standard library: it runs in the library's own environment.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["TANDEM_URL"] + "/v1"
MODEL = os.environ["TANDEM_MODEL"]
KEY = "none"
QUESTION = "What is the capital of France?"


def run(*checks: Callable[[], None]) -> None:
    """Runs all checks, and exits with 1 if one fails."""
    num_failed = 0
    for check in checks:
        try:
            check()
        except Exception as error:
            num_failed += 1
            traceback.print_exc()
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"failed {check.__name__}: {what}", flush=True)
        else:
            print(f"passed {check.__name__}", flush=True)
    sys.exit(bool(num_failed))
