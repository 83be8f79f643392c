"""Logs: one line an event, to standard error, under the name of the process.

TANDEM_LOG_LEVEL chooses the level, TANDEM_LOG_FORMAT `text` or `json`: then a line is one object,
with `request_id` where it is about a request, and whatever else was given as `extra`; of a
callable what it returns, which costs nothing where lines are text. No text from outside can write a
line of its own, or reach a terminal that shows the log: `printable` escapes what is not printable,
and the lines of a traceback are indented. Processes that a process starts, its engine for one,
inherit both variables. SIGUSR2 has a process write the stack of each of its threads.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pythonjsonlogger.msgspec import MsgspecFormatter

from tandem.common.printable import printable
from tandem.errors import ConfigError
from tandem.net.observability.log_file import FILE_VARIABLE, LogFileHandler

LEVEL_VARIABLE = "TANDEM_LOG_LEVEL"
FORMAT_VARIABLE = "TANDEM_LOG_FORMAT"
STACKS_SIGNAL = signal.SIGUSR2  # a process writes where each of its threads is
_JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}


def configure_logging(process: str) -> None:
    """`process` names this process in each line, such as `decode-0/io`. Raises ConfigError."""
    path = os.environ.get(FILE_VARIABLE)
    handler = LogFileHandler(Path(path)) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process))
    level = (os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{LEVEL_VARIABLE} is {level!r}; it must be a level, such as DEBUG")
    logging.basicConfig(handlers=[handler], level=level, force=True)
    faulthandler.enable(file=2)  # a crash in native code says where each thread was
    faulthandler.register(STACKS_SIGNAL, file=2)  # so does a process that hangs, when asked
    for noisy in ("httpx", "httpcore", "httpx2", "httpcore2", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def about(sequence_id: str) -> dict[str, str]:
    """The `extra` of a line about a sequence: its request, as `request_id`.

    Sequence ids are `REQUEST#ATTEMPT` where it decodes and `REQUEST#LEASE` where it is prefilled.
    """
    request_id = sequence_id.rpartition("#")[0]
    return {"request_id": request_id} if request_id else {}


class _TextFormatter(logging.Formatter):
    """One line an event; the lines of a traceback or a stack follow it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(stack_info)


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.split("\n"))


class _JsonFormatter(MsgspecFormatter):
    """Fields: time (RFC 3339, UTC), level, process, logger, message, exception, and the extras."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if line.isprintable():
            return line
        return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def _formatter(process: str) -> logging.Formatter:
    match os.environ.get(FORMAT_VARIABLE) or "text":
        case "text":
            return _TextFormatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
        case "json":
            return _JsonFormatter(
                ("asctime", "levelname", "name", "message"),
                static_fields={"process": process},
                rename_fields=_JSON_NAMES,
                json_default=lambda value: value() if callable(value) else str(value),
            )
        case other:
            raise ConfigError(f"{FORMAT_VARIABLE} is {other!r}; it must be text or json")
