"""`tandem`: the one command. Imports are inside the commands, so that each loads what it needs."""

import os
import sys
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="tandem",
    help="LLM serving with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure what this machine makes of Tandem.", no_args_is_help=True)
app.add_typer(bench, name="bench")

index_app = typer.Typer(help="Look after the prefix tree.", no_args_is_help=True)
app.add_typer(index_app, name="index")

# A program with options of its own.
_PROGRAM: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
_URL = Annotated[str, typer.Option(help="address of a router")]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"tandem {version('tandem-llm')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


@app.command(**_PROGRAM)
def up(context: typer.Context) -> None:
    """Start a whole cluster on this machine; Ctrl-C stops all of it (options: --help)."""
    from tandem.cluster.launch.options import LaunchOptions
    from tandem.errors import ConfigError
    from tandem.options import read

    options = read(LaunchOptions, "tandem up", context.args)
    from tandem.cluster.launch.launcher import up as launch

    try:
        status = launch(options)
    except ConfigError as error:
        _fail(error.message)
    raise typer.Exit(status)


@app.command()
def status(url: _URL = "http://127.0.0.1:8000") -> None:
    """Show pools, workers, load, KV use and transports."""
    from tandem.cluster.operate import OperateError, show_status

    try:
        show_status(url)
    except OperateError as error:
        _fail(str(error))


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=SIZE...")],
    url: _URL = "http://127.0.0.1:8000",
    deadline: Annotated[float, typer.Option(help="seconds to wait until it is so")] = 60.0,
) -> None:
    """Set pool sizes, such as prefill=2 decode=1, and wait until they are reached."""
    from tandem.cluster.operate import OperateError, scale_pools

    try:
        scale_pools(url, sizes, deadline_s=deadline)
    except OperateError as error:
        _fail(str(error))


@app.command("set-role")
@app.command("flip", hidden=True)  # the old name
def set_role(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    role: Annotated[str, typer.Option(help="prefill or decode; default: the other one")] = "",
    url: _URL = "http://127.0.0.1:8000",
) -> None:
    """Move a running worker to the other pool, or back, without a restart."""
    from tandem.cluster import operate

    try:
        operate.set_role(url, worker, role)
    except operate.OperateError as error:
        _fail(str(error))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    url: _URL = "http://127.0.0.1:8000",
    deadline: Annotated[float, typer.Option(help="seconds for what it holds")] = 30.0,
) -> None:
    """Have a worker leave in order: its requests move or end there, then its process ends.

    Who keeps workers (Ray, Kubernetes) starts a fresh one in its place; `scale` makes them fewer.
    """
    from tandem.cluster.operate import OperateError, drain_worker

    try:
        drain_worker(url, worker, deadline_s=deadline)
    except OperateError as error:
        _fail(str(error))


@index_app.command()
def verify(
    url: _URL = "http://127.0.0.1:8000",
    everything: Annotated[
        bool, typer.Option("--all", help="every entry, not a sample of each worker's")
    ] = False,
) -> None:
    """Compare the prefix tree with what workers hold; exit status 1 when they differ."""
    from tandem.cluster.operate import OperateError, verify_index

    try:
        if not verify_index(url, everything=everything):
            raise typer.Exit(1)
    except OperateError as error:
        _fail(str(error))


@bench.command(**_PROGRAM)
def transfer(context: typer.Context) -> None:
    """Compare NIXL and gRPC through Tandem with what they do raw (options: --help)."""
    _become_bench("transfer", context)


@bench.command(**_PROGRAM)
def index(context: typer.Context) -> None:
    """Time look-ups and publishing of the prefix tree in Redis (options: --help)."""
    _become_bench("index", context)


@bench.command(**_PROGRAM)
def engine(context: typer.Context) -> None:
    """Time prefill and decode of the model, compiled kernels beside torch (options: --help)."""
    _become_bench("engine", context)


@bench.command(**_PROGRAM)
def stages(context: typer.Context) -> None:
    """Show where the time of a model's step goes, stage by stage (options: --help)."""
    _become_bench("engine_stages", context)


@app.command(**_PROGRAM)
def simulate(context: typer.Context) -> None:
    """Replay a trace on simulated workers, to compare policies and sizes (options: --help)."""
    _become("tandem.simulator", context)


@app.command(**_PROGRAM)
def router(context: typer.Context) -> None:
    """Run one router; its secrets come from the environment (options: --help)."""
    _become("tandem.router", context)


@app.command(**_PROGRAM)
def worker(context: typer.Context) -> None:
    """Run one worker; its secrets come from the environment (options: --help)."""
    _become("tandem.worker", context)


def _become(module: str, context: typer.Context) -> NoReturn:
    """Replaces this process: signals reach the program, and this one loads none of its modules."""
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])


def _become_bench(program: str, context: typer.Context) -> NoReturn:
    if find_spec("tandem_bench") is None:
        _fail("the benchmarks are not installed: pip install 'tandem-llm[bench]'")
    _become(f"tandem_bench.{program}", context)


def _fail(message: str) -> NoReturn:
    print(f"tandem: {message}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
