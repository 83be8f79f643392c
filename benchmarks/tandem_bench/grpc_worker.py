"""The settings that the I/O processes of the gRPC bench share, and their link to an engine."""

from __future__ import annotations

from collections.abc import Callable

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Event
from tandem.worker.engine_process.program import start_program

TOKEN = "bench"
RAW_SERVICE = "tandem.bench.Raw"
RAW_METHOD = "Stream"
ENGINE_MODULE = "tandem_bench.engine_stand_in"


def worker_config(worker_id: str, model: str, num_blocks: int) -> WorkerConfig:
    """Returns the settings of a worker whose engine is the stand-in. `worker_id` is source (the
    producer) or reader (the consumer)."""
    return WorkerConfig(
        role="prefill" if worker_id == "source" else "decode",
        cluster=ClusterConfig(cluster_id="bench", redis_url="", token=TOKEN),
        engine=EngineConfig(model=model, num_blocks=num_blocks, block_size=16),
        transfer=TransferConfig(transport="grpc"),
        worker_id=worker_id,
    )


async def make_engine_link(
    config: WorkerConfig, on_event: Callable[[Event], None] = lambda event: None
) -> EngineLink:
    return EngineLink(config, "1", on_event, await start_program(ENGINE_MODULE))
