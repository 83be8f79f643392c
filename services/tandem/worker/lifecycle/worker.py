"""The I/O process of a worker: gRPC, Redis and metrics on asyncio, around one engine process.

    starting --> ready --> draining --> gone

A worker ends without a drain in three cases:

- The worker is stopped while its model loads.
- The other workers' KV format is different (`Incompatible`).
- The engine process ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from tandem.common.block_hash import HASH_VERSION
from tandem.common.config.cluster import Role
from tandem.common.config.worker import WorkerConfig
from tandem.common.process.garbage import exempt_loaded
from tandem.common.worker_load import WorkerLoad
from tandem.errors import WorkerLost
from tandem.net.observability.traces import make_tracing
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer
from tandem.net.store.registry import KvCompatibility, State, WorkerRecord, generation_of
from tandem.transfer.reads.messages import Broken
from tandem.worker.decode.prompt_prefill import Producers
from tandem.worker.decode.service import DecodeService
from tandem.worker.encoders import Encoders
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.program import EngineProgram
from tandem.worker.engine_process.watch import EngineWatch
from tandem.worker.kv_pulls.lease import ConsumerLease
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.lifecycle.adapters import NamedAdapters
from tandem.worker.lifecycle.drain import drain
from tandem.worker.lifecycle.host_state import HostState
from tandem.worker.lifecycle.kv_events import KvEvents
from tandem.worker.lifecycle.listening import listen
from tandem.worker.lifecycle.loading import start_and_tell
from tandem.worker.lifecycle.membership import Membership
from tandem.worker.lifecycle.role import RoleChange
from tandem.worker.lifecycle.warm import Warmer
from tandem.worker.metrics.probes import Probes
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.pairing import Pairing
from tandem.worker.peers.peers import Peers
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_pull import PrefixPuller
from tandem.worker.prefill.service import PrefillService

log = logging.getLogger(__name__)

_KILL_POLL_S = 0.05
_CLOSE_S = 1.0


class Worker:
    """Creates the worker's components and moves the worker through its states."""

    link: EngineLink
    rates: Rates
    peers: Peers
    decode: DecodeService
    prefill: PrefillService
    role: RoleChange
    compatibility: KvCompatibility

    def __init__(
        self,
        config: WorkerConfig,
        make_servicer: Callable[[Worker], WorkerServicer],
        engine: EngineProgram | None = None,
    ) -> None:
        """`make_servicer` makes the gRPC service that calls this worker. `engine` is an engine
        process that runs already. If it is None, `run` starts one."""
        assert config.role != "encode", "an encode worker has no KV (worker/encode/worker.py)"
        self._pool: Role = config.role
        self.config = config
        self._make_servicer = make_servicer
        self._engine = engine
        self.epoch = uuid.uuid4().hex[:16]
        self.state: State = "starting"
        self._has_joined = False  # whether routers can find this worker
        self._drain_until = math.inf  # time.monotonic() time of the drain's deadline, set by `stop`
        self._stopping = asyncio.Event()
        self._broken = ""  # reason why this process must end and be restarted; "" if there is none
        self._load = WorkerLoad()
        self.adapters = NamedAdapters(config.engine)
        self._address = ""
        self._metrics_address = ""
        self._model = ""
        self._kernels = ""
        self._max_model_len = 0
        self._started_at = time.time()
        self._host = HostState(config)
        self._events: KvEvents | None = None
        self._early: list[messages.Event] = []  # events that arrived before the worker was ready
        self._tracing = make_tracing(f"tandem-{config.role}", config.worker_id)

    def stop(self, deadline_s: float) -> None:
        """Starts the drain. `run` returns when no sequence or lease is left, or at the deadline.

        If `stop` is called several times, the earliest deadline applies.
        """
        self._drain_until = min(self._drain_until, time.monotonic() + deadline_s)
        self._stopping.set()

    async def tell_record(self) -> None:
        """Writes this worker's record to Redis now instead of at the next interval."""
        self._metrics.role = self.role.role
        await self._membership.refresh()

    def load(self) -> WorkerLoad:
        return self._load

    async def run(self) -> None:
        """Serves until `stop`. Raises WorkerLost if the engine ends or cannot pull any more."""
        self.link = EngineLink(self.config, self.epoch, self._on_event, self._engine)
        if self.config.transfer.nixl_tcp == "insecure":
            log.warning(
                "--nixl-tcp insecure: anyone who reaches this worker's UCX port can write "
                "into the engine's memory. Use this option only on a private network"
            )
        try:
            await self.adapters.read_own()
            if (ready := await self._start_engine()) is not None:
                await self._serve(ready)
        finally:
            await self.link.stop()
            await asyncio.to_thread(self._tracing.close)
        if self._broken:
            raise WorkerLost(self._broken)

    async def _start_engine(self) -> messages.Ready | None:
        """Starts the engine; returns None if `stop` was called before the model was loaded."""
        starting = asyncio.create_task(start_and_tell(self.config, self.link))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return await starting
            log.info("this worker was stopped before its model was loaded")
            while not starting.done():
                # A loading engine reads no commands, so it is killed. The loop repeats this,
                # because the process may not exist yet.
                self.link.kill("stopped before the model was loaded")
                await asyncio.wait([starting], timeout=_KILL_POLL_S)
            starting.exception()  # retrieves the error that `kill` caused
            return None
        finally:
            starting.cancel()
            stopping.cancel()

    async def _serve(self, ready: messages.Ready) -> None:
        server, self._address = listen(self.config, self._make_servicer(self))
        self._compose(ready)
        if self.config.events.kv_events:
            # The sockets are opened before the first step, so that no event is lost.
            self._events = await KvEvents.open(self.config)
        await server.start()
        exempt_loaded()
        self.role = RoleChange(self._pool, self.decode, self.prefill, self.tell_record)
        self._membership = membership = Membership(
            self.config.cluster,
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            role=self.role,
            tiers=self.config.engine.tiers,
            record=self._record,
            on_records=self._on_records,
        )
        self._metrics.watch(membership.publisher, self.adapters.metrics)
        watch = EngineWatch(
            self.config, self.link, self.load, is_used=self._is_used, give_up=self._give_up
        )
        probes = asyncio.create_task(self._probes.turn_for_ever())
        self.state = "ready"
        for event in self._early:
            self._on_event(event)
        try:
            if await self._unless(self._stopping.wait(), membership.join(self.compatibility)):
                self._has_joined = True
                log.info(
                    "%s worker %s is ready at %s",
                    self.role.role,
                    self.config.worker_id,
                    self._address,
                )
                warming = asyncio.create_task(self._warm())
                try:
                    await self._unless(self._stopping.wait(), watch.turn_for_ever())
                finally:
                    warming.cancel()
            if not self._broken:
                self.role.end_loan()
            self._leave_placement()
            await membership.refresh()
            draining = drain(self.decode, self.prefill, lambda: self._drain_until)
            await self._unless(draining, watch.turn_for_ever())
        except WorkerLost:
            # The engine is gone, so all streams are ended at once.
            await server.stop(None)
            raise
        finally:
            probes.cancel()
            await self.peers.aclose()
            await self._encoders.aclose()
            await membership.leave()
            self.decode.end_streams()
            events = self._events
            self._events = None
            if events is not None:
                await events.aclose()
            await server.stop(_CLOSE_S)

    def _compose(self, ready: messages.Ready) -> None:
        config = self.config
        log.info(
            "engine loaded: kernels: %s; data type: %s; KV pool: %d blocks of %d KiB each; load "
            "times in ms: %s",
            ready.kernels,
            ready.compute_dtype,
            ready.num_blocks,
            ready.rates.block_bytes >> 10,
            {name: round(ms) for name, ms in ready.load_ms.items()},
        )
        self._load = WorkerLoad(queue_max=config.engine.queue_max, blocks_total=ready.num_blocks)
        self._model = config.engine.model
        self._kernels = ready.kernels
        self._max_model_len = ready.max_model_len
        self.compatibility = KvCompatibility(
            model_fingerprint=ready.model_fingerprint,
            compute_dtype=ready.compute_dtype,
            numerics=ready.numerics,
            block_size=config.engine.block_size,
            kv_dtype=ready.kv_dtype,
            layout=ready.layout,
            hash_version=HASH_VERSION,
        )
        self._metrics = WorkerMetrics(worker_id=config.worker_id, role=config.role)
        self.rates = Rates(config, ready.rates)
        pairing = Pairing(config, self.epoch, self.link, self.rates, self.compatibility)
        self.peers = Peers(config, self.rates, pairing)
        self._encoders = Encoders(
            config, self.link, ready.model_fingerprint, self._metrics.on_encode_request
        )
        self._metrics.encode_workers.set_function(lambda: self._encoders.num_workers)
        parts = WorkerParts(config, self.link, self.rates, self._metrics, self._tracing)
        producers = self._producers(ready)
        self._probes = Probes(
            lambda: self.state if self._has_joined else "starting",
            lambda: self.link.send(messages.ListChains(0, 0)),
        )
        self._warmer = Warmer(config, self.link, producers.prefixes, self._metrics)
        self.prefill = PrefillService(
            parts, producers.prefixes, epoch=self.epoch, num_blocks=ready.num_blocks
        )
        identity = pb.PrefixHolder(
            worker_id=config.worker_id, epoch=self.epoch, address=self._address
        )
        self.decode = DecodeService(parts, producers, identity, ready.max_model_len)
        port = self._metrics.serve(
            config.host, config.metrics_port, self.load, lambda: self.rates.pairs, self._probes
        )
        self._metrics_address = f"{config.host}:{port}"

    def _producers(self, ready: messages.Ready) -> Producers:
        config = self.config
        puller = Puller(
            config.transfer,
            self.link,
            spans=ready.spans,
            rates=self.rates,
            on_mismatch=self._metrics.block_mismatches.inc,
        )
        make_lease = partial(ConsumerLease, puller=puller, rates=self.rates, config=config)
        prefixes = PrefixPuller(
            config, self.compatibility, self.peers, self.rates, self._metrics, make_lease
        )
        return Producers(self.peers, prefixes, make_lease)

    def _on_event(self, event: messages.Event) -> None:
        if self.state == "starting":
            self._early.append(event)
            return
        match event:
            case messages.Report():
                self._on_report(event)
            case messages.BlocksFinal(final_blocks):
                self.prefill.on_final_blocks(final_blocks)
            case messages.ImageWanted():
                self._encoders.on_wanted(event)
            case _:
                self._metrics.on_transfer(event)
                if isinstance(event, Broken):
                    self._give_up(event.message)

    def _on_report(self, report: messages.Report) -> None:
        step = report.step
        self.rates.on_step(step)
        self.prefill.on_report(report)
        self._warmer.on_step(step)
        self._load = msgspec.structs.replace(
            step.load,
            queue_max=self.config.engine.queue_max,
            num_leases=self.prefill.num_leases,
            step=report.tick,
        )
        self.adapters.stats = step.stats.adapters
        self.decode.on_report(report, self._load)
        self._membership.on_report(step)
        if self._events is not None:
            self._events.on_report(step)
        self._metrics.on_step(step)

    async def _warm(self) -> None:
        if self.config.transfer.warm_blocks and self.compatibility.has_windows_only:
            log.warning(
                "this new worker copies no cached blocks from other workers: all layers of "
                "the model have a sliding window, so no worker keeps the blocks of a whole "
                "prompt"
            )
        elif self.config.transfer.warm_blocks:
            await self._warmer.run(await self.peers.all_connected())

    def _on_records(self, records: list[WorkerRecord]) -> None:
        self._encoders.update(records)
        records = [r for r in records if not self.compatibility.differences(r.compatibility)]
        self.adapters.adopt(records)
        self.peers.update(records)
        self.decode.planner.update(records)

    def _give_up(self, message: str) -> None:
        """Drains the worker; `run` then raises WorkerLost, so that the worker is restarted.

        If a drain has already begun, this method does nothing.
        """
        if not self._stopping.is_set():
            log.error("this worker drains itself: %s", message)
            self._broken = message
            self.stop(self.config.drain_deadline_s)

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            role=self.role.role,
            pool=self.config.role,
            generation=generation_of(self.config.group, self.config.generation),
            group=self.config.group,
            state=self.state,
            address=self._address,
            metrics_address=self._metrics_address,
            model=self._model,
            kernels=self._kernels,
            num_ranks=self.config.engine.tensor_parallel,
            max_model_len=self._max_model_len,
            compatibility=self.compatibility,
            load=self._load,
            keeps_deadlines=True,
            prefill_at=self.config.transfer.prefill_at,
            counts=self._metrics.tally.counts,
            rates=self.rates.worker,
            pairs=self.rates.pairs,
            started_at=self._started_at,
            adapters=self.adapters.state,
            tiers=self._metrics.tiers,
            unreachable={**self.decode.planner.failed, **self.peers.unreachable},
            **self._host.told(),
        )

    async def _unless(
        self, ending: Coroutine[Any, Any, object], work: Coroutine[Any, Any, None]
    ) -> bool:
        """Runs `work` until it is done or `ending` is done. Returns True if `work` was done first.

        Raises an error of `work` or of `ending`, or WorkerLost if the engine ends first.
        """
        working = asyncio.create_task(work)
        until = asyncio.create_task(ending)
        ended = asyncio.create_task(self.link.ended())
        try:
            await asyncio.wait([working, until, ended], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
            if ended.done():
                raise WorkerLost(ended.result())
            await until
            return False
        finally:
            for task in (working, until, ended):
                task.cancel()

    def _leave_placement(self) -> None:
        """Accepts no new requests. Routers migrate sequences; peers can still pull this worker's
        blocks.
        """
        self.state = "draining"
        self.prefill.leave(lambda: self.decode.num_sequences > 0)
        self.decode.leave_pool()

    def _is_used(self) -> bool:
        return bool(self.decode.num_sequences or self.prefill.num_leases)
