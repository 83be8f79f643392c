"""`tandem worker --role decode ...`: one worker, with or without Ray around it."""

import asyncio
import logging
import signal
import uuid

from tandem.config.cluster import ClusterConfig
from tandem.config.worker import WorkerConfig, WorkerOptions
from tandem.errors import ConfigError, Incompatible, TandemError
from tandem.observability.logs import configure_logging
from tandem.options import extended, read

log = logging.getLogger("tandem.worker")


def main() -> None:
    options = read(WorkerOptions, "tandem worker")
    worker_id = options.worker_id or f"{options.role}-{uuid.uuid4().hex[:8]}"
    try:
        configure_logging(f"{worker_id}/io")
        cluster = ClusterConfig.from_environment()
        asyncio.run(_run(extended(options, WorkerConfig, cluster=cluster, worker_id=worker_id)))
    except TandemError as error:
        log.error("%s", error.message)
        raise SystemExit(2 if isinstance(error, ConfigError | Incompatible) else 1) from None


async def _run(config: WorkerConfig) -> None:
    # Imported late: --help and wrong settings answer at once.
    from tandem.worker.lifecycle.worker import Worker

    worker = Worker(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop, config.drain_deadline_s)
    await worker.run()


if __name__ == "__main__":
    main()
