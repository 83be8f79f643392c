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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
from tandem.common.config.cluster import LEAVE_SIGNAL
from tandem.common.config.router import RouterConfig
from tandem.common.process.cancellation import cancel
from tandem.common.process.garbage import exempt_loaded
from tandem.errors import MemoryGrown, TandemError
from tandem.models.files import naming, read_json_if_any
from tandem.models.images import read_rules
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
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
from tandem.prefix_index.redis import RedisIndex
from tandem.router.index.audit import IndexAudit
from tandem.router.index.metrics import IndexMetrics, counted_match
from tandem.router.index.trust import IndexTrust
from tandem.router.limits.meter import make_meter
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.memory_watch import MemoryWatch
from tandem.router.metrics.gen_ai import make_gen_ai_metrics
from tandem.router.metrics.router import Metrics, WorkerGauges
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.dispatcher import Dispatcher
from tandem.router.request.generator import Generator, LoadedModel
from tandem.router.request.prompt.prompts import PromptPreparer
from tandem.router.request.request import read_model_defaults
from tandem.router.scaling.adapters import AdapterControl
from tandem.router.scaling.autoscale import AutoscaleGauges, AutoscaleLoop
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.pool_watch import PoolWatch

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
        self._metrics = Metrics(make_gen_ai_metrics(_SERVICE, config.router_id))
        watch = PoolWatch(config.autoscale.cold_start_s)
        self.view = ClusterView(config.cluster, self._redis, config.tls_dir, pool_watch=watch)
        self._metrics.registry.register(WorkerGauges(self.view))
        self._index = RedisIndex(self._redis, config.cluster.cluster_id)
        index_metrics = IndexMetrics(self._metrics.registry)
        hashed_under = self.view.compatibility
        match = partial(counted_match, self._index, index_metrics, hashed_under)
        trust = IndexTrust(self.view, self._index, index_metrics)
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
        self._dispatcher = dispatcher = Dispatcher(
            config,
            self.view,
            match,
            self._metrics,
            on_end=trust.observe,
            have_tenants=lambda: config.trust_tenant_header or bool(ring.records),
        )
        tree = TreeInspector(self._redis, self._index)
        self._audit = IndexAudit(self.view, tree, trust, index_metrics)
        self._tracing = make_tracing(_SERVICE, config.router_id)
        self.tenants = make_meter(
            self._redis,
            config.cluster,
            config.router_id,
            TenantMetrics(self._metrics.registry),
            num_routers=lambda: self._keys.num_routers,
            is_limited=ring.is_limited,
        )
        self.generator = Generator(
            config, self.view, dispatcher, self._metrics, self.tenants, self._tracing
        )
        self.autoscale = AutoscaleLoop(
            config,
            self.view,
            self._metrics.demand,
            self._trail,
            num_held=self._num_held,
        )
        self._metrics.registry.register(AutoscaleGauges(self.view))
        self._control = ClusterControl(config, self.view, self._trail)
        self.page = PageFeed(
            config, self.generator, self._control, self._metrics, self._trail, self._access
        )
        self.picker: EndpointPicker | None = None
        self._fronts = Fronts(self._redis, config.cluster.cluster_id)
        picks = bool(config.gateway.endpoint_picker)
        self._public = self._make_picker() if picks else self._make_public()
        self._make_admin()
        self.listening = asyncio.Event()

    @property
    def http_port(self) -> int:
        """Port of the public HTTP API. The value is 0 until the port is bound."""
        return self._public.http_port

    @property
    def grpc_port(self) -> int:
        """Port of the public gRPC API, or of the endpoint picker. The value is 0 until the port is
        bound, and if there is no such port."""
        return self._public.grpc_port

    def _num_held(self) -> int:
        """Counts the requests that wait for a decode worker."""
        return self._dispatcher.num_pending + (self.picker.num_awaited if self.picker else 0)

    def _make_public(self) -> PublicListener:
        guard = CallGuard(self._access, self._trail)
        handlers = GrpcApi(self._config, self.generator, guard).handlers()
        clients = self._access.clients
        live = guard.live_peers
        return PublicListener(self._config, handlers, clients, live, self._tls)

    def _make_picker(self) -> PickerListener:
        table = FrontTable(self._fronts, self.view)
        self.picker = EndpointPicker(
            self._config,
            self.view,
            self.generator,
            self._dispatcher,
            table,
            self._access,
            self._metrics,
        )
        handlers = ExternalProcessor(self._config, self.picker).handlers()
        return PickerListener(self._config, handlers, table, self._access.clients, self._tls)

    def _make_admin(self) -> None:
        config = self._config
        adapters = AdapterControl(self._control, self.generator, self._trail)
        cluster = GrpcCluster(self._control, adapters, CallGuard(self._admin_access, self._trail))
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
        self.generator.end_reason = "this router will shut down soon"
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
            asyncio.create_task(self.view.events.run(), name="events"),
            asyncio.create_task(self.view.run(), name="cluster-view"),
            asyncio.create_task(self._load_and_watch(), name="model"),
            asyncio.create_task(self._audit.run(), name="index-audit"),
            asyncio.create_task(self._keys.run(own_url), name="api-keys"),
            asyncio.create_task(self.page.run(), name="page"),
            asyncio.create_task(self._stopping.wait(), name="stop"),
            *self._start_router_tasks(),
        }
        if self._config.autoscale.mode != "off":
            work.add(asyncio.create_task(self.autoscale.run(), name="autoscale"))
        if self._config.scale_objects:
            work.add(asyncio.create_task(self._control.sizes.watch(), name="sizes"))
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
        if worker_id := self._config.gateway.front_of:
            front = announce(self._fronts, worker_id, self._public.endpoint, self._is_ready)
            work.add(asyncio.create_task(front, name="front"))
        return work

    def _is_ready(self) -> bool:
        return not self.generator.not_ready_reason()

    def _make_apps(self) -> tuple[FastAPI, FastAPI]:
        """Builds the public and the admin HTTP app."""
        # If a port is 0 in the config, the operating system has chosen a port. The apps need the
        # chosen port for their messages.
        own = replace(self._config.admin, port=self.admin.http_port)
        config = replace(self._config, admin=own, http_port=self.http_port)
        self.page.config = config
        public = make_app(
            config, self.generator, self._access, self._keys, self._trail, self._redis
        )
        admin = make_admin_app(
            config,
            self.generator,
            self._control,
            self._metrics,
            self._audit,
            self._admin_access,
            self._keys,
            self._trail,
            self.page,
        )
        return public, admin

    def _log_listening(self) -> None:
        admin_host = self._config.admin.host
        ports = (admin_host, self.admin.http_port, admin_host, self.admin.grpc_port)
        log.info("the admin APIs listen: HTTP %s:%d, gRPC %s:%d", *ports)

    async def _drain(self, work: set[asyncio.Task[Any]]) -> None:
        deadline_s = self._config.drain_deadline_s
        log.info("this router is draining and shuts down within %g s", deadline_s)
        self.generator.end_reason = "this router is draining"
        named = {task.get_name(): task for task in work}
        if (front := named.pop("front", None)) is not None:
            # The front is removed from Redis first, so that gateways send no more requests to it.
            await cancel(front)
        cuts_idle = self.memory_error is not None
        await self._public.stop(deadline_s, named.pop("public"), cuts_idle=cuts_idle)
        self.page.close()
        await self.admin.stop(named.pop("admin-http"))
        await cancel(*named.values())
        if self.generator.model is not None:
            self.generator.model.preparer.close()
        await self._redis.aclose()
        await asyncio.to_thread(self._tracing.close)
        await asyncio.to_thread(self._metrics.gen_ai.close)

    async def _load_and_watch(self) -> None:
        loading = asyncio.to_thread(_load, self._config)
        model, _ = await asyncio.gather(loading, self._open_prefix_tree())
        # With the fingerprint, the view can tell which workers run the same model.
        self.view.model_fingerprint = model.folder.fingerprint
        self.generator.model = model
        self.view.notify_change()
        exempt_loaded()
        if self._memory is not None:
            self._memory.rebase()
        log.info("model %s is loaded", self.generator.served_name)
        jobs = [self._watch_readiness()]
        # `check` starts a process that tokenizes long prompts. With `--api grpc` long prompts are
        # rare, so the process starts only when the first long prompt arrives, which saves memory.
        if self._config.api != "grpc":
            jobs.append(model.preparer.check())
        await asyncio.gather(*jobs)

    async def _watch_readiness(self) -> None:
        reported: str | None = None
        while True:
            reason = self.generator.not_ready_reason() or self._public.not_ready_reason()
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
                async with asyncio.timeout(HEALTH_INTERVAL_S):
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


def _load(config: RouterConfig) -> LoadedModel:
    folder = resolve(config.model, revision=config.model_revision, model_impl=config.model_impl)
    sampling = _sampling_defaults(config, folder.path / "generation_config.json")
    tokenizer = Tokenizer(folder.path)
    preparer = PromptPreparer(
        folder.path,
        tokenizer,
        num_processes=config.tokenizer_processes,
        image_rules=read_rules(folder),
        finds_system=folder.config.has_states,
    )
    answers = ModelFormat(tokenizer, config.answers)
    created_s = int((folder.path / "config.json").stat().st_mtime)
    return LoadedModel(folder, tokenizer, preparer, answers, created_s, sampling)


def _sampling_defaults(config: RouterConfig, file: Path) -> Mapping[str, float]:
    """Reads the sampling defaults from the model's `generation_config.json`. Raises ConfigError if
    a value is out of range."""
    if config.answers.generation_config == "none":
        return {}
    with naming(file):
        defaults = read_model_defaults(read_json_if_any(file))
    if defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        log.info("defaults of the model for fields that a request does not set: %s", shown)
    return defaults
