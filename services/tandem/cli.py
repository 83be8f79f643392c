"""`tandem`: the one command. Imports are inside the commands, so that each loads what it needs."""

from __future__ import annotations

import os
import sys
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


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="a Hugging Face folder, a .gguf file, a hub name, or smollm2")
    ] = "smollm2",
    prefill: Annotated[int, typer.Option(help="prefill workers")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    host: Annotated[str, typer.Option(help="address of both public ports")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC")] = 8001,
    transport: Annotated[str, typer.Option(help="auto, nixl or grpc")] = "auto",
    nixl_tcp: Annotated[
        str, typer.Option(help="off or insecure: NIXL may use TCP, open to all who reach its port")
    ] = "off",
    verify_blocks: Annotated[
        str, typer.Option(help="off, sample or all: compare checksums of pulled blocks")
    ] = "off",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = "auto",
    numerics: Annotated[str, typer.Option(help="fast or invariant")] = "fast",
    kernels: Annotated[
        str, typer.Option(help="auto, native (C++ on CPUs), triton (CUDA) or torch")
    ] = "auto",
    weights: Annotated[str, typer.Option(help="auto or int8; int8: native kernels only")] = "auto",
    block_size: Annotated[int, typer.Option(help="tokens of a KV block")] = 16,
    kv_memory: Annotated[int, typer.Option(help="bytes of a worker's KV pool")] = 1 << 30,
    num_blocks: Annotated[int, typer.Option(help="instead of --kv-memory; 0: by memory")] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="sequences in one step of a worker")] = 64,
    max_tokens_per_step: Annotated[
        int, typer.Option(help="token budget of a step; 0: 512, on CUDA by the card")
    ] = 0,
    itl_target: Annotated[
        float,
        typer.Option(help="seconds to each next token, that chunks of prompts keep; 0: off"),
    ] = 0.1,
    threads: Annotated[int, typer.Option(help="of a worker's engine")] = 1,
    warm_blocks: Annotated[
        int, typer.Option(help="KV blocks that a new worker adopts from its peers; 0: none")
    ] = 0,
    ttft_limit: Annotated[
        float,
        typer.Option(min=0.0, help="seconds to a first token; refuse what waits longer; 0: off"),
    ] = 120.0,
    itl_limit: Annotated[
        float,
        typer.Option(min=0.0, help="seconds between two tokens; who would exceed it waits; 0: off"),
    ] = 0.0,
    trust_tenant_header: Annotated[
        bool,
        typer.Option("--trust-tenant-header", help="heed x-tandem-tenant; only behind a gateway"),
    ] = False,
    autoscale: Annotated[
        str, typer.Option(help="off, dry-run or on: the pools' sizes follow the load")
    ] = "off",
    autoscale_max: Annotated[int, typer.Option(help="workers of either pool, at most")] = 4,
    redis: Annotated[str, typer.Option(help="URL of a Redis to use; default: its own")] = "",
    die_with_parent: Annotated[
        int, typer.Option(metavar="PID", help="stop when the parent, process PID, ends")
    ] = 0,
) -> None:
    """Start a whole cluster on this machine; Ctrl-C stops all of it."""
    from tandem.cluster.launch.launcher import up as launch
    from tandem.cluster.launch.options import (
        LaunchOptions,
        autoscale_options,
        check_worker_options,
    )
    from tandem.errors import ConfigError

    engine: dict[str, str | int | float] = {
        "device": device,
        "dtype": dtype,
        "kv-dtype": kv_dtype,
        "numerics": numerics,
        "kernels": kernels,
        "weights": weights,
        "block-size": block_size,
        "kv-memory": kv_memory,
        "num-blocks": num_blocks,
        "max-num-seqs": max_num_seqs,
        "max-tokens-per-step": max_tokens_per_step,
        "itl-target": itl_target,
        "itl-limit": itl_limit,
        "threads": threads,
    }
    transfer = {"transport": transport, "nixl-tcp": nixl_tcp, "verify-blocks": verify_blocks}
    try:
        engine_config = check_worker_options(engine, transfer)
        options = LaunchOptions(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            host=host,
            http_port=port,
            grpc_port=grpc_port,
            redis_url=redis,
            parent_pid=die_with_parent or None,
            warm_blocks=warm_blocks,
            engine_config=engine_config,
            engine=tuple(part for k, v in engine.items() for part in (f"--{k}", str(v))),
            transfer=tuple(part for k, v in transfer.items() for part in (f"--{k}", v)),
            router=(
                *("--ttft-limit", str(ttft_limit)),
                *(["--trust-tenant-header"] if trust_tenant_header else []),
                *autoscale_options(autoscale, autoscale_max),
            ),
        )
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


@app.command()
def flip(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    role: Annotated[str, typer.Option(help="prefill or decode; default: the other one")] = "",
    url: _URL = "http://127.0.0.1:8000",
) -> None:
    """Move a running worker to the other pool, or back, without a restart."""
    from tandem.cluster.operate import OperateError, flip_worker

    try:
        flip_worker(url, worker, role)
    except OperateError as error:
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
    from tandem.cluster.index_verify import verify_index
    from tandem.cluster.operate import OperateError

    try:
        if not verify_index(url, everything=everything):
            raise typer.Exit(1)
    except OperateError as error:
        _fail(str(error))


@bench.command(**_PROGRAM)
def transfer(context: typer.Context) -> None:
    """Compare NIXL and gRPC through Tandem with what they do raw (options: --help)."""
    _become("bench.transfer", context)


@bench.command(**_PROGRAM)
def index(context: typer.Context) -> None:
    """Time look-ups and publishing of the prefix tree in Redis (options: --help)."""
    _become("bench.index", context)


@bench.command(**_PROGRAM)
def engine(context: typer.Context) -> None:
    """Time prefill and decode of the model, compiled kernels beside torch (options: --help)."""
    _become("bench.engine", context)


@bench.command(**_PROGRAM)
def stages(context: typer.Context) -> None:
    """Show where the time of a model's step goes, stage by stage (options: --help)."""
    _become("bench.engine_stages", context)


@app.command(**_PROGRAM)
def simulate(context: typer.Context) -> None:
    """Replay a trace on simulated workers, to compare policies and sizes (options: --help)."""
    _become("simulator", context)


@app.command(**_PROGRAM)
def router(context: typer.Context) -> None:
    """Run one router; its secrets come from the environment (options: --help)."""
    _become("router", context)


@app.command(**_PROGRAM)
def worker(context: typer.Context) -> None:
    """Run one worker; its secrets come from the environment (options: --help)."""
    _become("worker", context)


def _become(module: str, context: typer.Context) -> NoReturn:
    """Replaces this process: signals reach the program, and this one loads none of its modules."""
    os.execv(sys.executable, [sys.executable, "-m", f"tandem.{module}", *context.args])


def _fail(message: str) -> NoReturn:
    print(f"tandem: {message}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
