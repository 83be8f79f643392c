"""The program `tandem worker --role decode ...`: one worker, with or without Ray."""

import signal
from typing import TYPE_CHECKING

from tandem.common.process.early_end import end_on_sigterm, quietly
from tandem.common.process.garbage import without_collection

if TYPE_CHECKING:
    from tandem.common.config.worker import WorkerConfig
    from tandem.worker.encode.worker import EncodeWorker
    from tandem.worker.lifecycle.worker import Worker

# The worker exits at most this many seconds after the deadline of its drain. Kubernetes kills the
# worker 15 s after that deadline (with the Helm chart), so this time is shorter.
_CLOSE_MAX_S = 12.0


def main(engine_module: str | None = None) -> None:
    """Runs the worker. `engine_module` is the module that runs as the engine process. Tests and
    benchmarks use modules of their own."""
    # Import late, so that SIGTERM can end the program during the imports.
    import asyncio
    import logging
    import uuid
    from dataclasses import replace

    from tandem.common.config.cluster import ClusterConfig
    from tandem.common.config.worker import WorkerConfig, WorkerOptions
    from tandem.common.options import extended, read
    from tandem.common.speculation import without_draft
    from tandem.errors import ConfigError, Incompatible, TandemError
    from tandem.net.observability.logs import configure_logging
    from tandem.worker.engine_process.program import ENGINE_MODULE

    options = read(WorkerOptions, "tandem worker")
    worker_id = options.worker_id or f"{options.role}-{uuid.uuid4().hex[:8]}"
    try:
        configure_logging(f"{worker_id}/io")
        cluster = ClusterConfig.from_environment()
        config = extended(options, WorkerConfig, cluster=cluster, worker_id=worker_id)
        if config.role == "prefill":
            # A prefill worker generates few tokens, also if it decodes. There, and if an operator
            # moves it to the decode pool, it proposes text that repeats.
            setting = without_draft(config.engine.speculative_config)
            config = replace(config, engine=replace(config.engine, speculative_config=setting))
        if config.role == "encode":
            asyncio.run(_encode(config))
        else:
            asyncio.run(_run(config, engine_module or ENGINE_MODULE))
    except TandemError as error:
        logging.getLogger("tandem.worker").error("%s", error.message)
        raise SystemExit(2 if isinstance(error, ConfigError | Incompatible) else 1) from None


async def _run(config: "WorkerConfig", engine_module: str) -> None:
    from tandem.worker.engine_process.program import start_program

    # The engine process and this process import their modules at the same time.
    engine = await start_program(engine_module)
    # Import late, so that --help and wrong settings are answered quickly.
    with without_collection():
        from tandem.worker.lifecycle.servicer import Servicer
        from tandem.worker.lifecycle.worker import Worker

    await _serve(Worker(config, Servicer, engine))


async def _encode(config: "WorkerConfig") -> None:
    with without_collection():
        from tandem.worker.encode.servicer import EncodeServicer
        from tandem.worker.encode.worker import EncodeWorker

    await _serve(EncodeWorker(config, EncodeServicer))


async def _serve(worker: "Worker | EncodeWorker") -> None:
    import asyncio
    import faulthandler

    from tandem.errors import ConfigError, Incompatible, TandemError
    from tandem.worker.lifecycle.loading import tell_failed

    config = worker.config

    def stop() -> None:
        worker.stop(config.drain_deadline_s)
        # If the worker does not end in time, it logs its stacks and exits before kubelet kills it.
        faulthandler.dump_traceback_later(config.drain_deadline_s + _CLOSE_MAX_S, exit=True)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await worker.run()
    except TandemError as error:
        if worker.state == "starting" or isinstance(error, ConfigError | Incompatible):
            await tell_failed(config, error.message)
        raise


if __name__ == "__main__":
    end_on_sigterm()
    quietly(main)
