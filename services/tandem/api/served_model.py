"""The parts of a router that each of its models has for itself: the view of the workers, placement,
requests, sizes of the pools, metrics and the operators' page.

The parts of one model know nothing of other models. `router/request/models.py` chooses the model of
a request, and `router/scaling/controls.py` that of an operator's change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.common.config.router import RouterConfig
from tandem.common.printable import shorten
from tandem.errors import ModelNotFound
from tandem.models.files import naming, read_json_if_any
from tandem.models.images import read_rules
from tandem.models.scoring import read_scorer
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.net.observability.traces import Tracing
from tandem.net.security.audit_trail import AuditTrail
from tandem.net.security.key_ring import KeyRing
from tandem.net.store.client import Client
from tandem.prefix_index.audit import TreeInspector
from tandem.prefix_index.replicated import ReplicatedIndex
from tandem.router.index.audit import IndexAudit
from tandem.router.index.metrics import IndexMetrics, counted_match
from tandem.router.index.trust import IndexTrust
from tandem.router.limits.meter import TenantMeter
from tandem.router.metrics.router import Metrics, WorkerGauges
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.dispatcher import Dispatcher
from tandem.router.request.generator import Generator, LoadedModel
from tandem.router.request.prompt.prompts import PromptPreparer
from tandem.router.request.request import read_model_defaults
from tandem.router.scaling.autoscale import AutoscaleGauges, AutoscaleLoop
from tandem.router.scaling.control import ClusterControl
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.pool_watch import PoolWatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts that all models of a router share."""

    redis: Client
    index: ReplicatedIndex
    index_metrics: IndexMetrics
    tree: TreeInspector
    ring: KeyRing
    trail: AuditTrail
    tenants: TenantMeter
    tracing: Tracing
    num_routers: Callable[[], int]


@dataclass(slots=True)
class ServedModel:
    """The parts of one model. `config` has the model's own settings."""

    config: RouterConfig
    view: ClusterView
    metrics: Metrics
    dispatcher: Dispatcher
    generator: Generator
    autoscale: AutoscaleLoop
    control: ClusterControl
    audit: IndexAudit
    # time.monotonic() until which the autoscaler sees a request that an endpoint picker refused
    awaited_until: float = 0.0

    @property
    def num_awaited(self) -> int:
        """The number of requests that wait for an endpoint picker, as the autoscaler sees them.

        It is 1 while there is no decode worker, for at most `hold_deadline_s` after a request was
        refused because of this, so that the autoscaler starts a worker. Otherwise it is 0.
        Requests never really wait in a picker.
        """
        is_awaited = time.monotonic() < self.awaited_until
        return int(is_awaited and not self.view.has_decode_worker())

    def start(self) -> set[asyncio.Task[None]]:
        """Starts the tasks of the model, which run until they are cancelled."""
        of = f" of {self.config.group}" if self.config.group else ""
        work = {
            asyncio.create_task(self.view.events.run(), name=f"events{of}"),
            asyncio.create_task(self.view.run(), name=f"cluster-view{of}"),
            asyncio.create_task(self.audit.run(), name=f"index-audit{of}"),
        }
        if self.config.autoscale.mode != "off":
            work.add(asyncio.create_task(self.autoscale.run(), name=f"autoscale{of}"))
        if self.config.scale_objects:
            work.add(asyncio.create_task(self.control.sizes.watch(), name=f"sizes{of}"))
        return work

    def take(self, model: LoadedModel) -> None:
        """Begins to serve requests, after the model is loaded."""
        # With the fingerprint, the view can tell which workers run the same model.
        self.view.model_fingerprint = model.folder.fingerprint
        self.generator.model = model
        self.view.notify_change()
        log.info("model %s is loaded", self.generator.served_name)


def served_model(served: Sequence[ServedModel], name: str) -> ServedModel:
    """Returns the model with this name or group, or the first one for "". Raises ModelNotFound."""
    for each in served:
        if name in ("", each.generator.served_name, each.config.group):
            return each
    names = ", ".join(repr(each.generator.served_name) for each in served)
    raise ModelNotFound(f"there is no model {shorten(name)}; there are: {names}", param="model")


def make_served_model(config: RouterConfig, metrics: Metrics, shared: SharedParts) -> ServedModel:
    """Makes the parts of one model, which is not loaded yet."""
    served: ServedModel
    watch = PoolWatch(config.autoscale.cold_start_s, config.group)
    view = ClusterView(
        config.cluster,
        shared.redis,
        config.tls_dir,
        group=config.group,
        pool_watch=watch,
        num_routers=shared.num_routers,
    )
    metrics.registry.register(WorkerGauges(view))
    metrics.registry.register(AutoscaleGauges(view))
    trust = IndexTrust(view, shared.index, shared.index_metrics)
    dispatcher = Dispatcher(
        config,
        view,
        partial(counted_match, shared.index, shared.index_metrics, view.compatibility),
        metrics,
        on_end=trust.observe,
        have_tenants=lambda: config.trust_tenant_header or bool(shared.ring.records),
    )
    generator = Generator(config, view, dispatcher, metrics, shared.tenants, shared.tracing)
    control = ClusterControl(config, view, shared.trail)
    autoscale = AutoscaleLoop(
        config,
        view,
        metrics.demand,
        shared.trail,
        num_held=lambda: dispatcher.num_pending + served.num_awaited,
    )
    served = ServedModel(
        config,
        view,
        metrics,
        dispatcher,
        generator,
        autoscale,
        control,
        IndexAudit(view, shared.tree, trust, shared.index_metrics),
    )
    return served


def load_model(config: RouterConfig) -> LoadedModel:
    """Loads what a router needs of a model. Raises ConfigError."""
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
    scorer = read_scorer(folder, tokenizer, config.score_template)
    return LoadedModel(folder, tokenizer, preparer, answers, created_s, sampling, scorer)


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
