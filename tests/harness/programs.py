"""The options of the programs, to compare command lines with them."""

from __future__ import annotations

from tandem.common.config.router import RouterOptions
from tandem.common.config.worker import WorkerOptions
from tandem.common.options import arguments, parse, to_text

SETTINGS = {"worker": WorkerOptions, "router": RouterOptions}


def program_defaults(program: str) -> dict[str, str]:
    """Defaults of the options as command-line words, by name without leading dashes."""
    return {
        a.name.removeprefix("--"): to_text(a.field_info.default)
        for a in arguments(SETTINGS[program])
        if a.parse
    }


def parse_worker(command: list[str]) -> WorkerOptions:
    """Parses the options of `tandem worker ...`. Raises ConfigError."""
    return parse(WorkerOptions, "tandem worker", _arguments(command, "worker"))


def parse_router(command: list[str]) -> RouterOptions:
    """Parses the options of `tandem router ...`. Raises ConfigError."""
    return parse(RouterOptions, "tandem router", _arguments(command, "router"))


def _arguments(command: list[str], program: str) -> list[str]:
    """Extracts the arguments of `tandem PROGRAM`, which the chart starts with SIGTERM blocked."""
    blocked = ["env", "--block-signal=TERM"]
    words = command[len(blocked) :] if command[: len(blocked)] == blocked else command
    assert words[:2] == ["tandem", program]
    return words[2:]
