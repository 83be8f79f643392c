"""An encode worker: one process that computes the embeddings of images for other workers.

    starting --> ready --> draining --> gone

It has the vision tower of the model and no KV, so it takes no sequences. Other workers find it by
its record in Redis. It ends without a drain if it is stopped while the tower loads, if an image
takes longer than ENCODE_DEADLINE_S, or if the cluster's encode workers have another checkpoint.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import time
import uuid
from collections.abc import Callable

import torch

from tandem.common.config.worker import WorkerConfig
from tandem.common.process.cancellation import cancel
from tandem.common.worker_load import WorkerLoad
from tandem.engine.executor.runner import choose_device
from tandem.engine.executor.vision_tower import VisionTower
from tandem.engine.image_rows import ENCODE_DEADLINE_S
from tandem.engine.memory import read_memory
from tandem.errors import ConfigError, WorkerLost
from tandem.models.folder import ModelFolder
from tandem.models.images import read_rules, tower_bytes
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer
from tandem.net.store.client import UNREACHABLE, connect
from tandem.net.store.registry import (
    ENCODE_GENERATION,
    KvCompatibility,
    State,
    WorkerRecord,
    generation_of,
)
from tandem.worker.encode.service import QUEUE_MAX, EncodeService
from tandem.worker.lifecycle.host_state import HostState
from tandem.worker.lifecycle.listening import listen
from tandem.worker.lifecycle.loading import tell_loading
from tandem.worker.lifecycle.registration import Registration
from tandem.worker.metrics.probes import Probes
from tandem.worker.metrics.worker import WorkerMetrics

log = logging.getLogger(__name__)

_POLL_S = 0.05
_CLOSE_S = 1.0
_EXIT_S = 5.0  # a process whose image still computes exits after so many seconds


class EncodeWorker:
    """Loads the tower and moves the worker through its states."""

    def __init__(
        self, config: WorkerConfig, make_servicer: Callable[[EncodeWorker], WorkerServicer]
    ) -> None:
        """`make_servicer` makes the gRPC service that calls this worker."""
        self.config = config
        self._make_servicer = make_servicer
        self.epoch = uuid.uuid4().hex[:16]
        self.state: State = "starting"
        self._drain_until = math.inf  # time.monotonic() time of the drain's deadline
        self._stopping = asyncio.Event()
        self._address = self._metrics_address = ""
        self._started_at = time.time()
        self._host = HostState(config)
        self._metrics = WorkerMetrics(worker_id=config.worker_id, role="encode")

    def stop(self, deadline_s: float) -> None:
        """Starts the drain. `run` returns when no request is open, or at the deadline."""
        self._drain_until = min(self._drain_until, time.monotonic() + deadline_s)
        self._stopping.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises ConfigError if the model takes no images, and WorkerLost if
        an image hangs."""
        loading = asyncio.create_task(asyncio.to_thread(self._load))
        telling = asyncio.create_task(tell_loading(self.config, lambda: (0, 0)))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                log.info("this worker was stopped before its model was loaded")
                return
            folder, tower = await loading
        finally:
            stopping.cancel()
            await cancel(telling)
        self._folder = folder
        self.service = EncodeService(
            tower.encode,
            folder.fingerprint,
            on_computed=self._metrics.image_s.observe,
            cores=self.config.cores,
        )
        try:
            await self._serve()
        finally:
            self.service.close()
            if self.service.computing_s:
                # The end of the process would wait for the image's thread, which may hang.
                faulthandler.dump_traceback_later(_EXIT_S, exit=True)

    def _load(self) -> tuple[ModelFolder, VisionTower]:
        options = self.config.engine
        folder = resolve(
            options.model, revision=options.model_revision, model_impl=options.model_impl
        )
        rules = read_rules(folder)
        if isinstance(rules, str):
            raise ConfigError(f"--role encode cannot be used: {rules}")
        needed, memory = tower_bytes(folder), read_memory()
        device = choose_device(options)
        if device.type == "cpu" and needed > memory.free_bytes:
            raise ConfigError(
                f"the vision tower needs {needed:,} bytes; {memory.place} has "
                f"{memory.free_bytes:,} bytes free"
            )
        torch.set_num_threads(options.num_threads)
        tower = VisionTower(folder, rules, device)
        tower.load()
        return folder, tower

    async def _serve(self) -> None:
        config = self.config
        service = self.service
        server, self._address = listen(config, self._make_servicer(self))
        await server.start()
        probes = Probes(lambda: self.state, lambda: None)
        port = self._metrics.serve(config.host, config.metrics_port, self.load, dict, probes)
        self._metrics_address = f"{config.host}:{port}"
        turning = asyncio.create_task(probes.turn_for_ever())
        redis = connect(config.cluster.redis_url)
        registration = Registration(
            redis, config.cluster, record=self.record, on_records=lambda records: None
        )
        joining = asyncio.create_task(registration.join(self.record().compatibility))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                await joining
                self.state = "ready"
                await registration.start()
                log.info("encode worker %s is ready at %s", config.worker_id, self._address)
            await self._watch(lambda: not self._stopping.is_set())
            self.state = "draining"
            service.is_draining = True
            await registration.refresh()
            await self._watch(
                lambda: bool(service.num_open) and time.monotonic() < self._drain_until
            )
        finally:
            for task in (turning, joining, stopping):
                task.cancel()
            await registration.stop()
            try:
                await registration.remove()
            except UNREACHABLE as error:
                registration.note_unreachable(error)
            await redis.aclose()
            await server.stop(_CLOSE_S)

    async def _watch(self, goes_on: Callable[[], bool]) -> None:
        """Returns when `goes_on()` is false. Raises WorkerLost if an image takes too long."""
        while goes_on():
            if self.service.computing_s > ENCODE_DEADLINE_S:
                raise WorkerLost(f"an image was not computed in {ENCODE_DEADLINE_S:g} s")
            await asyncio.sleep(_POLL_S)

    def load(self) -> WorkerLoad:
        num_images = self.service.num_images
        return WorkerLoad(
            num_running=min(num_images, 1),
            num_waiting=max(0, num_images - 1),
            queue_max=QUEUE_MAX,
        )

    def record(self) -> WorkerRecord:
        config = self.config
        return WorkerRecord(
            worker_id=config.worker_id,
            epoch=self.epoch,
            role="encode",
            pool="encode",
            generation=generation_of(config.group, config.generation + ENCODE_GENERATION),
            group=config.group,
            state=self.state,
            address=self._address,
            metrics_address=self._metrics_address,
            model=config.engine.model,
            kernels="torch",
            max_model_len=0,
            compatibility=KvCompatibility.of_encode_worker(self._folder.fingerprint),
            load=self.load(),
            started_at=self._started_at,
            **self._host.told(),
        )
