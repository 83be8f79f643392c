"""`tandem config show` prints the options with which `tandem up` would start, as a file for
`--config`. Each option that is set has a comment with its source."""

import os
import re
from collections.abc import Sequence
from typing import Any

import yaml
from cyclopts import Argument
from rich.console import Console

from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.cluster import API_KEY_VARIABLE
from tandem.common.config.more_models import with_all_models
from tandem.common.option_sources import parse_from_sources
from tandem.common.options import arguments, setting, to_text

_MASK = "***"
_PASSWORD = re.compile(r"(://[^:@/\s]*:)[^@/\s]+(?=@)|([?&]password=)[^&\s]+")


def show_config(argv: Sequence[str]) -> None:
    """Prints all options. `argv` has options of `tandem up`, which override variables and the file,
    as in `tandem up`. Raises ConfigError."""
    found = parse_from_sources(LaunchOptions, "tandem config show", with_all_models(argv))
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    title = ""
    shown = [a for a in arguments(LaunchOptions) if a.parse]
    for argument in sorted(shown, key=lambda a: _group(a).sort_key):
        if title != _group(argument).name:
            title = _group(argument).name
            console.print(f"# {title}", style="bold")
        line = _line(argument, setting(found.settings, argument))
        if source := found.sources.get(argument.name):
            console.print(f"{line}  # {source}")
        else:
            console.print(line, style="dim")
    if os.environ.get(API_KEY_VARIABLE):
        console.print(f"# The API key is {_MASK} (variable {API_KEY_VARIABLE}).")


def _line(argument: Argument, value: Any) -> str:
    """Returns the line of the file that sets the option to this value."""
    show = argument.parameter.show_default
    if callable(show):
        text = show(value)
        value = int(text) if text.isdecimal() else text
    elif not isinstance(value, bool | int | float):
        value = to_text(value)
    if isinstance(value, str):
        value = _PASSWORD.sub(rf"\1\2{_MASK}", value)
    name = argument.name.removeprefix("--")
    return str(yaml.safe_dump({name: value}, width=10_000, allow_unicode=True)).strip()


def _group(argument: Argument) -> Any:
    (group,) = argument.parameter.group  # type: ignore[misc]
    return group
