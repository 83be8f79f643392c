"""Runs one router: opens the ports, loads the model, serves requests, and drains.

  state      begins                                    /ready   requests
  binding    at the start                               -       cannot arrive: the ports are closed
  listening  when the ports are open                    503     refused until the model is loaded;
                                                                then they wait for a worker
  ready      when the model and workers are available   200     served
  leaving    on `LEAVE_SIGNAL`                          503     served
  draining   on SIGTERM or SIGINT                       503     new requests are refused, open ones
                                                                are served
  closed     when the open requests have ended, or at    -      cannot arrive: the ports are closed
             the drain deadline

A leaving router still serves, but answers 503 at /ready, so that load balancers choose other
routers. The ports are open before the model is loaded, so that probes can report the progress.
"""

import asyncio
import contextlib
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from tandem.api.admin.app import make_admin_app
from tandem.api.admin.listener import AdminListener
from tandem.api.admin.page_feed import PageFeed
from tandem.api.app import make_app
from tandem.api.gateway.ext_proc import ExternalProcessor
from tandem.api.gateway.fronts import FrontTable, announce
from tandem.api.gateway.listener import PickerListener
from tandem.api.gateway.picker import EndpointPicker
from tandem.api.grpc.access import CallGuard
from tandem.api.grpc.cluster import GrpcCluster
from tandem.api.grpc.inference import GrpcApi
from tandem.api.listener import PublicListener
from tandem.api.routes.batches import BatchService
from tandem.api.served_model import SharedParts, load_model, make_served_model
from tandem.common.config.cluster import LEAVE_SIGNAL
from tandem.common.config.router import RouterConfig
from tandem.common.process.cancellation import cancel
from tandem.common.process.garbage import exempt_loaded
from tandem.common.process.ticks import until_tick_s
from tandem.errors import FilesUnavailable, MemoryGrown, TandemError
from tandem.net.files.open import check_files, open_files
from tandem.net.observability.traces import make_tracing
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security.access import Access, is_loopback
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.body_budget import BodyBudget
from tandem.net.security.clients import Clients
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.key_service import KeyService
from tandem.net.store.client import REPLY_TIMEOUT_S, UNREACHABLE, Client, connect
from tandem.net.store.fronts import Fronts
from tandem.prefix_index.audit import TreeInspector
from tandem.prefix_index.replica import Replica
from tandem.prefix_index.replicated import ReplicatedIndex
from tandem.router.index.metrics import IndexMetrics
from tandem.router.limits.meter import make_meter
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.memory_watch import MemoryWatch
from tandem.router.metrics.gen_ai import make_gen_ai_metrics
from tandem.router.metrics.router import Metrics
from tandem.router.request.generator import Generator
from tandem.router.request.models import Models
from tandem.router.scaling.adapters import AdapterControl
from tandem.router.scaling.controls import ClusterControls
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
_SERVICE = "tandem-router"  # name of the service in OpenTelemetry traces and metrics


class Router:
    """One router. `run` serves until `stop` is called."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self.memory_error: MemoryGrown | None = None
        self._memory: MemoryWatch | None = None
        self._redis: Client = connect(config.cluster.redis_url)
        self._tls = _public_certificate(config)
        gen_ai = make_gen_ai_metrics(_SERVICE, config.router_id)
        self._metrics = Metrics(gen_ai)
        index_metrics = IndexMetrics(self._metrics.registry)
        # The replica waits in Redis calls, so it has connections of its own.
        self._replica_redis: Client = connect(config.cluster.redis_url)
        replica = Replica(
            self._replica_redis,
            config.cluster.cluster_id,
            bytes_max=config.prefix_replica_memory,
            on_delay=index_metrics.replica_delay_s.observe,
        )
        self._index = ReplicatedIndex(self._redis, config.cluster.cluster_id, replica)
        index_metrics.index = self._index
        ring = KeyRing(age_max_s=config.keys_max_age_s)
        bodies = BodyBudget(config.unparsed_bytes_max, config.addresses.unparsed_bytes_per_address)
        self._access = _access(config, ring, config.host, bodies)
        self._admin_access = _access(config, ring, config.admin.host, bodies)
        self._trail = AuditTrail(self._redis, config.cluster.cluster_id, router_id=config.router_id)
        self._keys = KeyService(
            self._redis,
            config.cluster,
            ring,
            router_id=config.router_id,
            file=config.keys_file,
            tls=self._tls,
        )
        self._tracing = make_tracing(_SERVICE, config.router_id)
        self.tenants = make_meter(
            self._redis,
            config.cluster,
            config.router_id,
            TenantMetrics(self._metrics.registry),
            num_routers=lambda: self._keys.num_routers,
            is_limited=ring.is_limited,
        )
        shared = SharedParts(
            self._redis,
            self._index,
            index_metrics,
            TreeInspector(self._redis, self._index),
            ring,
            self._trail,
            self.tenants,
            self._tracing,
            lambda: self._keys.num_routers,
        )
        self.first = make_served_model(config, self._metrics, shared)
        self.served = [
            self.first,
            *(
                make_served_model(each, Metrics(gen_ai, has_process=False), shared)
                for each in config.further()
            ),
        ]
        # by group
        self._pages = {
            each.config.group: PageFeed(
                each.config, each.generator, each.control, each.metrics, self._trail, self._access
            )
            for each in self.served
        }
        for page in self._pages.values():
            page.siblings = list(self._pages.values())
        self.models = Models(*(each.generator for each in self.served))
        self.controls = ClusterControls(*(each.control for each in self.served))
        self._batches = self._make_batches()
        self.picker: EndpointPicker | None = None
        self._fronts = Fronts(self._redis, config.cluster.cluster_id)
        picks = bool(config.gateway.endpoint_picker)
        self._public = self._make_picker() if picks else self._make_public()
        self._make_admin()
        self.listening = asyncio.Event()

    @property
    def view(self) -> ClusterView:
        """The workers of the first model."""
        return self.first.view

    @property
    def generator(self) -> Generator:
        """The generator of the first model."""
        return self.first.generator

    @property
    def http_port(self) -> int:
        """Port of the public HTTP API. The value is 0 until the port is bound."""
        return self._public.http_port

    @property
    def grpc_port(self) -> int:
        """Port of the public gRPC API, or of the endpoint picker. The value is 0 until the port is
        bound, and if there is no such port."""
        return self._public.grpc_port

    def _make_batches(self) -> BatchService | None:
        config = self._config
        gateway = config.gateway
        # A front serves the requests of one worker only, and a picker or a gRPC replica no files.
        if config.api == "grpc" or gateway.endpoint_picker or gateway.front_of:
            return None
        store = open_files(config.files)
        if store is None:
            return None
        return BatchService(config, store, self.served)

    def _make_public(self) -> PublicListener:
        guard = CallGuard(self._access, self._trail)
        handlers = GrpcApi(self._config, self.models, guard).handlers()
        clients = self._access.clients
        live = guard.live_peers
        return PublicListener(self._config, handlers, clients, live, self._tls)

    def _make_picker(self) -> PickerListener:
        table = FrontTable(self._fronts, [each.view for each in self.served])
        self.picker = EndpointPicker(self._config, self.served, table, self._access)
        handlers = ExternalProcessor(self._config, self.picker).handlers()
        return PickerListener(self._config, handlers, table, self._access.clients, self._tls)

    def _make_admin(self) -> None:
        config = self._config
        adapters = AdapterControl(self.first.control, self.models, self._trail)
        guard = CallGuard(self._admin_access, self._trail)
        cluster = GrpcCluster(self.controls, adapters, guard)
        self.admin = AdminListener(
            config, cluster.handlers(), self._admin_access.clients, self._tls
        )

    def stop(self) -> None:
        """Ends `run`. New requests are refused, and open requests may continue until the drain
        deadline."""
        self._stopping.set()

    def stop_for_memory(self, why: str) -> None:
        """Ends `run` because the process uses too much memory, and sets `memory_error`."""
        self.memory_error = MemoryGrown(why)
        log.error("%s", why)
        self.view.events.add("memory", self._config.router_id, why)
        self.stop()

    def announce_end(self) -> None:
        """Makes the readiness probe fail, although the router still serves requests. The caller
        calls `stop` later."""
        log.info("this router will shut down soon; it still serves requests")
        self.models.set_end_reason("this router will shut down soon")
        self.view.notify_change()

    async def run(self) -> None:
        """Serves until `stop` is called. Raises ConfigError if a port is in use or the model cannot
        be loaded."""
        # A router that cannot bind one of its ports must serve no request. So all ports are bound
        # first.
        self._public.bind()
        self.admin.bind()
        own_url = self._public.own_url
        await self._keys.refresh(own_url)
        for access in (self._access, self._admin_access):
            access.check_start()
        if self._batches is not None:
            try:
                await check_files(self._batches.store, self._config.files.files_url)
            except FilesUnavailable as error:
                log.warning("files and batches are not served now: %s", error.message)
        await self._public.start()
        app, admin_app = self._make_apps()
        admin = await self.admin.start(admin_app)
        self._log_listening()
        self.listening.set()
        if self._config.has_leaking_port:
            loop = asyncio.get_running_loop()
            self._memory = MemoryWatch(
                self._config.grpc_memory,
                lambda why: loop.call_soon_threadsafe(self.stop_for_memory, why),
            )
            self._memory.start()
        work: set[asyncio.Task[Any]] = {
            self._public.serve(app),
            admin,
            asyncio.create_task(self._trail.run(), name="audit-trail"),
            asyncio.create_task(self._load_and_watch(), name="model"),
            asyncio.create_task(self._index.replica.run(), name="prefix-replica"),
            asyncio.create_task(self._keys.run(own_url), name="api-keys"),
            asyncio.create_task(self._stopping.wait(), name="stop"),
            *self._start_router_tasks(),
            *(task for each in self.served for task in each.start()),
            *(asyncio.create_task(p.run(), name=f"page {g}") for g, p in self._pages.items()),
        }
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._drain(work)

    def _start_router_tasks(self) -> set[asyncio.Task[Any]]:
        """Starts the tasks that only a router that serves requests needs. An endpoint picker serves
        no requests, so it has none of these tasks."""
        if not isinstance(self._public, PublicListener):
            return set()
        work = {
            asyncio.create_task(self.tenants.limiter.run(), name="limits"),
            asyncio.create_task(self.tenants.usage.run(), name="usage"),
        }
        if self._batches is not None:
            work.add(asyncio.create_task(self._batches.runner.run(), name="batches"))
        if worker_id := self._config.gateway.front_of:
            front = announce(self._fronts, worker_id, self._public.endpoint, self._is_ready)
            work.add(asyncio.create_task(front, name="front"))
        return work

    def _is_ready(self) -> bool:
        return not self.models.not_ready_reason()

    def _make_apps(self) -> tuple[FastAPI, FastAPI]:
        """Builds the public and the admin HTTP app."""
        # If a port is 0 in the config, the operating system has chosen a port. The apps need the
        # chosen port for their messages.
        own = replace(self._config.admin, port=self.admin.http_port)
        config = replace(self._config, admin=own, http_port=self.http_port)
        for each in self.served:
            page = self._pages[each.config.group]
            page.config = replace(each.config, admin=own, http_port=self.http_port)
        public = make_app(
            config,
            self.models,
            self._access,
            self._keys,
            self._trail,
            self._redis,
            self._batches,
        )
        admin = make_admin_app(
            config, self.served, self._pages, self._admin_access, self._keys, self._trail
        )
        return public, admin

    def _log_listening(self) -> None:
        admin_host = self._config.admin.host
        ports = (admin_host, self.admin.http_port, admin_host, self.admin.grpc_port)
        log.info("the admin APIs listen: HTTP %s:%d, gRPC %s:%d", *ports)

    async def _drain(self, work: set[asyncio.Task[Any]]) -> None:
        deadline_s = self._config.drain_deadline_s
        log.info("this router is draining and shuts down within %g s", deadline_s)
        self.models.set_end_reason("this router is draining")
        named = {task.get_name(): task for task in work}
        if (front := named.pop("front", None)) is not None:
            # The front is removed from Redis first, so that gateways send no more requests to it.
            await cancel(front)
        if (batches := named.pop("batches", None)) is not None:
            await cancel(batches)  # another router continues them at once
        cuts_idle = self.memory_error is not None
        await self._public.stop(deadline_s, named.pop("public"), cuts_idle=cuts_idle)
        for page in self._pages.values():
            page.close()
        await self.admin.stop(named.pop("admin-http"))
        await cancel(*named.values())
        for generator in self.models:
            if generator.model is not None:
                generator.model.preparer.close()
        await self._redis.aclose()
        await self._replica_redis.aclose()
        await asyncio.to_thread(self._tracing.close)
        await asyncio.to_thread(self._metrics.gen_ai.close)

    async def _load_and_watch(self) -> None:
        opening = asyncio.create_task(self._open_prefix_tree())
        for each in self.served:
            each.take(await asyncio.to_thread(load_model, each.config))
        self.models.check_names()
        await opening
        exempt_loaded()
        if self._memory is not None:
            self._memory.rebase()
        jobs = [self._watch_readiness()]
        # `check` starts a process that tokenizes long prompts. With `--api grpc` long prompts are
        # rare, so the process starts only when the first long prompt arrives, which saves memory.
        if self._config.api != "grpc":
            jobs.append(self._check_tokenizers())
        await asyncio.gather(*jobs)

    async def _check_tokenizers(self) -> None:
        # One after another, because each check has a deadline and starts a process.
        for generator in self.models:
            if generator.model is not None:
                await generator.model.preparer.check()

    async def _watch_readiness(self) -> None:
        reported: str | None = None
        while True:
            reason = self.models.not_ready_reason() or self._public.not_ready_reason()
            if reason != reported:
                for server in filter(None, (self._public.grpc, self.admin.grpc)):
                    await server.set_ready(ready=not reason)
                self._metrics.serving.set(not reason)
                (log.warning if reason else log.info)("%s", reason or "ready")
                self.view.events.add(
                    "mode", self._config.router_id, reason or "requests are served"
                )
                reported = reason
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_tick_s(HEALTH_INTERVAL_S)):
                    await self.view.wait_change()

    async def _open_prefix_tree(self) -> None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._index.open()
        except UNREACHABLE as error:
            log.warning(
                "the prefix tree cannot be opened, because Redis does not answer: %r", error
            )


def serve(config: RouterConfig) -> TandemError | None:
    """Runs a router until SIGTERM or SIGINT. If an error ends the router earlier, such as a port
    that is in use, returns this error.

    Raises ConfigError for invalid settings.
    """

    async def main() -> TandemError | None:
        router = Router(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, router.stop)
        loop.add_signal_handler(LEAVE_SIGNAL, router.announce_end)
        try:
            await router.run()
        except TandemError as error:
            return error
        return router.memory_error

    return asyncio.run(main())


def _public_certificate(config: RouterConfig) -> CertificateFiles | None:
    tls = config.tls
    return CertificateFiles(Path(tls.tls_cert), Path(tls.tls_key)) if tls.tls_cert else None


def _access(config: RouterConfig, ring: KeyRing, host: str, bodies: BodyBudget) -> Access:
    """Builds the rules for API keys and client limits of the listener on `host`."""
    return Access(
        ring,
        is_loopback=is_loopback(host),
        allows_anonymous=config.allow_anonymous,
        clients=Clients(
            config.addresses.trusted_proxies, requests_max=config.requests_per_address_max
        ),
        bodies=bodies,
    )
