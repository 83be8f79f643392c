"""The programs' own parsers, to hold command lines of others against them."""

from __future__ import annotations

import argparse
from typing import Any

from typer.main import get_command_from_info
from typer.models import CommandInfo

from tandem.router import __main__ as router_main
from tandem.worker import __main__ as worker_main

WORKER = get_command_from_info(
    CommandInfo(callback=worker_main.main), pretty_exceptions_short=True, rich_markup_mode=None
)


def worker_defaults() -> dict[str, Any]:
    """By the options' names, without dashes before them."""
    return {p.name.replace("_", "-"): p.default for p in WORKER.params if p.name}


def router_defaults() -> dict[str, Any]:
    actions = router_main._parser()._actions
    return {a.dest.replace("_", "-"): a.default for a in actions if a.dest != "help"}


def parse_worker(command: list[str]) -> dict[str, Any]:
    """Of `tandem worker ...`. Raises click's UsageError."""
    assert command[:2] == ["tandem", "worker"]
    return WORKER.make_context("worker", command[2:]).params


def parse_router(command: list[str]) -> argparse.Namespace:
    """Of `tandem router ...`. Raises SystemExit."""
    assert command[:2] == ["tandem", "router"]
    return router_main._parser().parse_args(command[2:])
