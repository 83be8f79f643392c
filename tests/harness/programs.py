"""The programs' own options, to hold command lines of others against them."""

from __future__ import annotations

from tandem.config.router import RouterOptions
from tandem.config.worker import WorkerOptions
from tandem.options import arguments, parse, to_text

SETTINGS = {"worker": WorkerOptions, "router": RouterOptions}


def program_defaults(program: str) -> dict[str, str]:
    """The options' defaults as words of a command line, by names without dashes before them."""
    return {
        a.name.removeprefix("--"): to_text(a.field_info.default)
        for a in arguments(SETTINGS[program])
        if a.parse
    }


def parse_worker(command: list[str]) -> WorkerOptions:
    """Options of `tandem worker ...`. Raises ConfigError."""
    assert command[:2] == ["tandem", "worker"]
    return parse(WorkerOptions, "tandem worker", command[2:])


def parse_router(command: list[str]) -> RouterOptions:
    """Options of `tandem router ...`. Raises ConfigError."""
    assert command[:2] == ["tandem", "router"]
    return parse(RouterOptions, "tandem router", command[2:])
