"""`tandem completion` prints or installs a script with which a shell completes command lines.

The script has the commands, options and choices. Names of workers come from a router at the moment
of completion: the script calls `tandem __complete`, which runs the completers in `commands.py`.
"""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import App, Parameter

from tandem.cluster.launch.controller import ControllerOptions
from tandem.cluster.launch.joined_host import JoinOptions
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.redis_front import RedisFrontOptions
from tandem.common.config.router import RouterOptions
from tandem.common.config.worker import WorkerOptions
from tandem.common.options import Options, Switch, make_app, read
from tandem.ops.commands import app as tandem
from tandem.ops.kv_size.options import KvSizeOptions
from tandem.ops.simulator.options import SimulateOptions

Shell = Literal["auto", "bash", "zsh", "fish"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions(Options):
    """`tandem completion` prints the script with which a shell completes commands and options."""

    shell: Annotated[Shell, Parameter(show_default=False)] = field(default="auto", kw_only=False)
    """Shell for which the script is made. Default: the shell that runs this command."""
    install: Switch = False
    """Install the script for this user, in the folder from which the shell loads completions."""


# command that parses its arguments itself -> its settings
_PROGRAMS = {
    "controller": ControllerOptions,
    "router": RouterOptions,
    "worker": WorkerOptions,
    "redis-front": RedisFrontOptions,
    "kv-size": KvSizeOptions,
    "simulate": SimulateOptions,
    "completion": CompletionOptions,
}
_WITH_FILE = {"up": LaunchOptions, "serve": LaunchOptions, "join": JoinOptions}


def main() -> None:
    options = read(CompletionOptions, "tandem completion")
    shell = _current_shell() if options.shell == "auto" else options.shell
    _add_options(tandem)
    if options.install:
        path = tandem.install_completion(shell=shell)
        print(f"the completion script is in {path}; a new {shell} session uses it")
    else:
        print(tandem.generate_completion(shell=shell))


def _add_options(app: App) -> None:
    """Adds the options of commands that parse their arguments themselves. Each of these commands is
    replaced by an app that has its options."""
    for name, made in (*_PROGRAMS.items(), *_WITH_FILE.items()):
        replaced = app[name]
        named = make_app(made, name, has_file=name in _WITH_FILE)
        named.group, named.help = replaced.group, replaced.help
        del app[name]
        app.command(named)


def _current_shell() -> Literal["bash", "zsh", "fish"]:
    """Returns the shell that runs this process. Exits with an error if it is not known."""
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = detect_shell()
    except ShellDetectionError:
        found = "powershell"
    if found == "powershell":
        sys.exit("tandem completion: the shell was not recognized; name it: bash, zsh or fish")
    return found


if __name__ == "__main__":
    main()
