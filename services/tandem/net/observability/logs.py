"""Logging: one line for each event, to standard error, with the name of the process.

TANDEM_LOG_LEVEL sets the level. TANDEM_LOG_FORMAT sets the format, `text` or `json`. Child
processes, such as the engine, inherit both variables.

A JSON line is one object. It has all fields that the caller gives as `extra`, among them
`request_id` for an event about a request. A callable in `extra` is called only for JSON.

Text from clients cannot start a new log line or send control codes to a terminal: `printable`
escapes all characters that are not printable, and the lines of a traceback are indented.

On SIGUSR2 a process writes the stacks of all its threads.
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
STACKS_SIGNAL = signal.SIGUSR2  # a process that gets this signal writes the stacks of all threads
_JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}


def configure_logging(process: str) -> None:
    """Configures the logging of this process. Each line contains the name `process`, for example
    `decode-0/io`. Raises ConfigError for an unknown level or format."""
    path = os.environ.get(FILE_VARIABLE)
    handler = LogFileHandler(Path(path)) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process))
    level = (os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"{LEVEL_VARIABLE} is {level!r}; it must be DEBUG, INFO, WARNING, ERROR or CRITICAL"
        )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    faulthandler.enable(file=2)  # writes the stacks of all threads if native code crashes
    # On STACKS_SIGNAL, writes the stacks of all threads, which shows where a process hangs.
    faulthandler.register(STACKS_SIGNAL, file=2)
    for noisy in ("httpx", "httpcore", "httpx2", "httpcore2", "asyncio", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def about(sequence_id: str) -> dict[str, str]:
    """Returns the argument `extra` for a log line about a sequence. It has the id of the sequence's
    request.

    Sequence ids are `REQUEST#ATTEMPT` in decode workers and `REQUEST#LEASE` in prefill workers.
    """
    request_id = sequence_id.rpartition("#")[0]
    return {"request_id": request_id} if request_id else {}


class _TextFormatter(logging.Formatter):
    """Formats an event as one line, followed by the indented lines of a traceback or stack."""

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
    """Formats an event as JSON: time (RFC 3339, UTC), level, process, logger, message, exception
    and extras."""

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
