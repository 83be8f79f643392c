"""Reads options from the command line, environment variables and a file, for `tandem up` and
`tandem join`.

The value of an option comes from the first of these sources that has one:

1. the command line, such as `--kv-memory 4GiB`
2. a variable, such as `TANDEM_KV_MEMORY=4GiB`
3. the YAML file that `--config` or `TANDEM_CONFIG` names, in a line such as `kv-memory: 4GiB`
4. the default

Other programs read no such variables. `tandem up` and `tandem join` remove the variables from their
environment, so that their child processes do not get them.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cyclopts import App, Argument, ArgumentCollection, CycloptsError
from cyclopts.config import Env, Yaml

from tandem.common.options import make_app, parse_app
from tandem.common.printable import printable
from tandem.errors import ConfigError

T = TypeVar("T")

_PREFIX = "TANDEM_"
_COMMAND_LINE = "command line"
# Value of the variable NAME_PORT, which Kubernetes sets in each pod for a Service called NAME. A
# Service called `tandem` gives TANDEM_PORT, one called `tandem-admin` gives TANDEM_ADMIN_PORT.
_KUBERNETES = re.compile(r"(tcp|udp|sctp)://\S+")


@dataclass(frozen=True, slots=True)
class Sourced(Generic[T]):
    """Settings, and where they come from."""

    settings: T
    # option -> "command line", the name of a variable, or the path of the file; options at their
    # defaults have no source
    sources: Mapping[str, str]
    variables: frozenset[str]  # names of the variables that can set options


def read_from_sources(made: type[T], program: str, argv: Sequence[str]) -> Sourced[T]:
    """Returns the settings, and removes the variables of options from this process's environment. A
    wrong option ends the process with status 2 and one line on stderr."""
    try:
        found = parse_from_sources(made, program, argv)
    except ConfigError as error:
        print(f"{program}: {printable(error.message)}", file=sys.stderr)
        raise SystemExit(2) from None
    for variable in found.variables:
        os.environ.pop(variable, None)
    return found


def parse_from_sources(made: type[T], program: str, argv: Sequence[str]) -> Sourced[T]:
    """Returns the settings. Raises ConfigError, or SystemExit after --help."""
    variables: set[str] = set()
    sources: dict[str, str] = {}

    def list_variables(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
        variables.update(_variable(name) for each in arguments for name in each.names)
        for variable in sorted(variables & os.environ.keys()):
            _drop_if_of_kubernetes(variable, program)

    def record(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
        for argument in arguments:
            for token in argument.tokens:
                if token.source != "cli" and _variable(token.keyword or "") in _negative(argument):
                    positive = argument.name.removeprefix("--")
                    raise CycloptsError(
                        msg=f"{token.keyword} is an option of the command line only; set "
                        f"{positive} to false instead"
                    )
                named = {"cli": _COMMAND_LINE, "env": token.keyword}
                sources[argument.name] = named.get(token.source) or token.source

    app = make_app(made, program, has_file=True)
    variable = Env(_PREFIX, command=False, show=False)
    app.config = (list_variables, variable, _read_file, record)
    return Sourced(parse_app(app, argv), sources, frozenset(variables))


def _drop_if_of_kubernetes(variable: str, program: str) -> None:
    """Removes a variable that Kubernetes has set, and prints a note."""
    value = os.environ[variable]
    if _KUBERNETES.fullmatch(value):
        del os.environ[variable]
        service = variable.removesuffix("_PORT").lower().replace("_", "-")
        print(
            f"{program}: {variable}={printable(value)} is ignored: Kubernetes sets this "
            f"variable for the Service {service}, so it is not read as an option of Tandem",
            file=sys.stderr,
        )


class _File(Yaml):
    """A YAML file whose values are read as text, as on the command line. YAML's own types would
    turn `autoscale: on` into `true`, so they are not used."""

    def _load_config(self, path: Path) -> dict[str, Any]:
        import yaml  # here, because its import takes 20 ms

        try:
            loaded = yaml.load(path.read_text("utf-8"), Loader=yaml.BaseLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CycloptsError(msg=f"{path} cannot be read as YAML: {error}") from None
        if not isinstance(loaded or {}, dict):
            raise CycloptsError(msg=f"{path} must have lines such as `port: 8000`")
        return {name: _as_text(value) for name, value in (loaded or {}).items()}


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{key}={entry}" for key, entry in value.items()]
    return ",".join(value) if isinstance(value, list) else value


def _read_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Adds the options of the file that `--config` names. The command line and the variables have
    been read already, so their values stay."""
    found = arguments.get("--config", None)
    for token in found.tokens if found else ():
        file = _File(path=token.value, must_exist=True, use_commands_as_keys=False)
        try:
            file(app, commands, arguments)
        except FileNotFoundError:
            raise CycloptsError(msg=f"--config: there is no file {token.value}") from None


def _variable(name: str) -> str:
    """Returns the name of an option's variable: TANDEM_KV_MEMORY for --kv-memory."""
    return _PREFIX + name.strip("-[]").removeprefix(_PREFIX).replace("-", "_").upper()


def _negative(argument: Argument) -> list[str]:
    return [_variable(name) for name in argument.negatives]
