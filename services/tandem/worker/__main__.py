"""`tandem worker --role decode ...`: one worker, with or without Ray around it.

Exit status: 0 after a drain (SIGTERM or SIGINT), 1 when the engine ended or the worker drained
itself because it could pull no more, 2 for wrong settings or a refused contract, which no restart
would mend.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from typing import Annotated

import typer

from tandem.config import ClusterConfig, EngineConfig, TransferConfig, WorkerConfig
from tandem.errors import ConfigError, Incompatible, TandemError
from tandem.observability.logs import configure_logging

log = logging.getLogger("tandem.worker")


def main(
    role: Annotated[str, typer.Option(help="prefill or decode: the pool it is in")],
    model: Annotated[str, typer.Option(help="Hugging Face folder, GGUF file or hub name")],
    worker_id: Annotated[str, typer.Option()] = "",
    host: Annotated[
        str, typer.Option(help="address that routers and peers reach it at")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: chosen by the system")] = 0,
    metrics_port: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    numerics: str = "fast",
    kernels: Annotated[
        str, typer.Option(help="auto, native (C++ on CPUs), triton (CUDA) or torch")
    ] = "auto",
    weights: Annotated[str, typer.Option(help="auto or int8; int8: native kernels only")] = "auto",
    block_size: int = 16,
    kv_memory: Annotated[int, typer.Option(help="bytes of the KV pool")] = 1 << 30,
    num_blocks: Annotated[int, typer.Option(help="instead of --kv-memory; 0: by memory")] = 0,
    max_model_len: Annotated[int, typer.Option(help="tokens; 0: the model's own")] = 0,
    max_num_seqs: int = 64,
    max_tokens_per_step: Annotated[
        int, typer.Option(help="token budget; 0: 512, on CUDA by the card")
    ] = 0,
    itl_target: Annotated[
        float, typer.Option(help="seconds to each next token, that chunks of prompts keep; 0: off")
    ] = 0.1,
    queue_max: int = 256,
    itl_limit: Annotated[
        float,
        typer.Option(help="seconds between two tokens, by which sequences wait for a seat; 0: off"),
    ] = 0.0,
    threads: int = 1,
    cores: Annotated[str, typer.Option(help="cores to pin the engine to, such as 0 or 0,1")] = "",
    transport: str = "auto",
    nixl_tcp: Annotated[
        str, typer.Option(help="off or insecure: NIXL may use TCP, open to all who reach its port")
    ] = "off",
    prefill_at: Annotated[
        str, typer.Option(help="auto, remote or local: where longer prompts are computed")
    ] = "auto",
    local_prefill_max_tokens: int = 64,
    verify_blocks: Annotated[
        str, typer.Option(help="off, sample or all: blocks pulled here, checked by checksum")
    ] = "off",
    transfer_delay: Annotated[float, typer.Option(help="for tests: seconds added to a pull")] = 0.0,
    overlap: Annotated[
        bool, typer.Option(help="to measure: pull while the next blocks are computed, or after")
    ] = True,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="seconds without a step, then a source counts as hung")
    ] = 30.0,
    pull_deadline: Annotated[float, typer.Option(help="seconds for one run of blocks")] = 30.0,
    engine_hang_timeout: Annotated[
        float, typer.Option(help="seconds without a turn of its own engine, then it is ended")
    ] = 60.0,
    start_deadline: Annotated[
        float, typer.Option(help="seconds for a model's download, conversion and loading")
    ] = 1800.0,
    warm_blocks: Annotated[
        int, typer.Option(help="KV blocks to adopt from peers after joining; 0: start cold")
    ] = 0,
    generation: Annotated[
        str,
        typer.Option(help="another name than the workers' that it is to replace, in an upgrade"),
    ] = "",
    drain_deadline: Annotated[float, typer.Option(help="seconds")] = 30.0,
) -> None:
    """Runs one worker until it is drained."""
    worker_id = worker_id or f"{role}-{uuid.uuid4().hex[:8]}"
    try:
        configure_logging(f"{worker_id}/io")
        config = WorkerConfig(
            role=role,  # type: ignore[arg-type]
            cluster=ClusterConfig.from_environment(),
            engine=EngineConfig(
                model=model,
                device=device,  # type: ignore[arg-type]
                dtype=dtype,  # type: ignore[arg-type]
                kv_dtype=kv_dtype,  # type: ignore[arg-type]
                numerics=numerics,  # type: ignore[arg-type]
                kernels=kernels,  # type: ignore[arg-type]
                weights=weights,  # type: ignore[arg-type]
                block_size=block_size,
                kv_bytes_max=kv_memory,
                num_blocks=num_blocks or None,
                max_model_len=max_model_len or None,
                max_num_seqs=max_num_seqs,
                max_tokens_per_step=max_tokens_per_step or None,
                itl_target_s=itl_target,
                queue_max=queue_max,
                itl_limit_s=itl_limit,
                num_threads=threads,
            ),
            transfer=TransferConfig(
                transport=transport,  # type: ignore[arg-type]
                nixl_tcp=nixl_tcp,  # type: ignore[arg-type]
                prefill_at=prefill_at,  # type: ignore[arg-type]
                local_prefill_max_tokens=local_prefill_max_tokens,
                heartbeat_timeout_s=heartbeat_timeout,
                pull_deadline_s=pull_deadline,
                verify_blocks=verify_blocks,  # type: ignore[arg-type]
                delay_s=transfer_delay,
                overlap=overlap,
            ),
            worker_id=worker_id,
            host=host,
            port=port,
            metrics_port=metrics_port,
            drain_deadline_s=drain_deadline,
            engine_hang_timeout_s=engine_hang_timeout,
            start_deadline_s=start_deadline,
            warm_blocks=warm_blocks,
            generation=generation,
            cores=tuple(int(core) for core in cores.split(",") if core),
        )
        asyncio.run(_run(config))
    except (ConfigError, Incompatible) as error:
        log.error("%s", error.message)
        raise SystemExit(2) from None
    except TandemError as error:
        log.error("%s", error.message)
        raise SystemExit(1) from None


async def _run(config: WorkerConfig) -> None:
    # Imported late: --help and wrong settings answer at once.
    from tandem.worker.lifecycle.worker import Worker

    worker = Worker(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop, config.drain_deadline_s)
    await worker.run()


if __name__ == "__main__":
    typer.run(main)
