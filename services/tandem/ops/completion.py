"""`tandem completion` prints or installs a script with which a shell completes command lines.

The script has the commands, options and choices. Names of workers come from a router at the moment
of completion: the script calls `tandem __complete`, which asks the command.
"""

from typing import Literal

from cyclopts import App

from tandem.cluster.launch.controller import ControllerOptions
from tandem.cluster.launch.joined_host import JoinOptions
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.redis_front import RedisFrontOptions
from tandem.common.config.router import RouterOptions
from tandem.common.config.worker import WorkerOptions
from tandem.common.options import make_app
from tandem.errors import ConfigError
from tandem.ops.kv_size.options import KvSizeOptions
from tandem.ops.simulator.options import SimulateOptions

Shell = Literal["bash", "zsh", "fish"]

# command that parses its arguments itself -> its settings
_PROGRAMS = {
    "controller": ControllerOptions,
    "router": RouterOptions,
    "worker": WorkerOptions,
    "redis-front": RedisFrontOptions,
    "kv-size": KvSizeOptions,
    "simulate": SimulateOptions,
}
_WITH_FILE = {"up": LaunchOptions, "serve": LaunchOptions, "join": JoinOptions}


def print_script(app: App, shell: Shell | None) -> None:
    """Prints the script for `shell`, by default the shell that runs this process. Raises
    ConfigError if that shell is unknown."""
    _add_options(app)
    print(app.generate_completion(shell=_known(shell)))


def install_script(app: App, shell: Shell | None) -> None:
    """Writes the script to where the shell finds it, and prints the path. Raises ConfigError."""
    _add_options(app)
    path = app.install_completion(shell=(known := _known(shell)))
    print(f"{path}: begin a new {known} to use it")


def _add_options(app: App) -> None:
    """Replaces the commands that parse their arguments themselves by apps that have the options."""
    for name, made in (*_PROGRAMS.items(), *_WITH_FILE.items()):
        replaced = app[name]
        named = make_app(made, name, has_file=name in _WITH_FILE)
        named.group, named.help = replaced.group, replaced.help
        del app[name]
        app.command(named)


def _known(shell: Shell | None) -> Shell:
    if shell is not None:
        return shell
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = detect_shell()
    except ShellDetectionError:
        found = None
    if found is None or found == "powershell":
        raise ConfigError("the shell is not known; name it: tandem completion bash, zsh or fish")
    return found
