"""Logs: one line an event, to standard error, under the name of the process."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging(process: str) -> None:
    """`process` names this process in each line, such as `decode-0/io`. Level: TANDEM_LOG_LEVEL."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("TANDEM_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
        force=True,
    )
    for noisy in ("httpx", "httpcore", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
