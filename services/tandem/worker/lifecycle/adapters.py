"""The LoRA adapters that this worker serves: those of `--lora` and those that operators add.

An adapter stays in the worker's record until an operator removes it or the worker ends. A new
worker adopts the adapters of the other workers, so that a rolling restart loses none. The engine
reads an adapter's weights when the first sequence needs them. If reading an adapter's folder hangs,
the reading process ends itself, and the worker ends with it.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics_core import Metric

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.common.process.hang_limit import hang_limit
from tandem.engine.adapter_slots import READ_DEADLINE_S
from tandem.engine.types import AdapterStats
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig
from tandem.models.lora.adapter import WEIGHTS_FILE, open_lora
from tandem.models.source import resolve
from tandem.net.store.registry import AdapterState, WorkerRecord
from tandem.worker.metrics.adapters import adapter_metrics

log = logging.getLogger(__name__)


class NamedAdapters:
    """The adapters that a worker serves.

    The keys of `named` are the model names that clients use for the adapters. The files of adapters
    are read in threads.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: ModelConfig | None = None
        self.named: dict[str, Adapter] = {}
        self.stats = AdapterStats()  # statistics from the engine's last report
        self._has_adopted = False
        self._turn = asyncio.Lock()  # allows one task at a time to read a folder

    @property
    def state(self) -> AdapterState:
        """The state of the adapters for the worker's record."""
        rank_max = self._config.max_lora_rank if self._config.max_loras else 0
        named = list(self.named.values())
        return AdapterState(named, self.stats.loaded, self.stats.failed, rank_max)

    def metrics(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Returns the gauge of the engine's LoRA adapters."""
        return adapter_metrics(labels, self.stats, self._config.max_loras)

    async def read_own(self) -> None:
        """Adds the adapters of `--lora`. Raises ConfigError with the name of an adapter that cannot
        be used.
        """
        for name, path in self._config.lora.items():
            try:
                async with self._turn:
                    self.add(await asyncio.to_thread(self._read_own, name, path))
            except ConfigError as error:
                raise type(error)(f"lora {name}: {error.message}") from error

    def adopt(self, records: Iterable[WorkerRecord]) -> None:
        """Adds the adapters of the ready workers. Only the first call has an effect.

        Later calls do nothing, so that an adapter that an operator removed stays removed.
        """
        if self._has_adopted:
            return
        self._has_adopted = True
        named = [each for r in records if r.state == "ready" for each in r.adapters.named]
        for adapter in sorted(named, key=lambda each: each.added_at):
            known = self.named.get(adapter.name)
            if known is None or known.added_at < adapter.added_at:
                self.add(adapter)

    async def describe(self, path: str) -> tuple[str, int]:
        """Returns (digest, rank) of an adapter's folder. Raises ConfigError if it cannot be
        used.
        """
        async with self._turn:
            return await asyncio.to_thread(self._describe, path)

    def add(self, adapter: Adapter) -> None:
        """Serves an adapter. An adapter that was served under the same name is replaced."""
        log.info(
            "serving adapter %s with digest %s from %s", adapter.name, adapter.digest, adapter.path
        )
        self.named[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Stops serving the adapter of this name."""
        if self.named.pop(name, None) is not None:
            log.info("adapter %s is no longer served", name)

    def _read_own(self, name: str, path: str) -> Adapter:
        digest, rank = self._describe(path)
        # If two workers start with different adapters of one name, the adapter with the newer files
        # is used.
        return Adapter(name, digest, path, rank, (Path(path) / WEIGHTS_FILE).stat().st_mtime)

    def _describe(self, path: str) -> tuple[str, int]:
        config = self._config
        if not config.max_loras:
            raise ConfigError(
                "this worker serves no adapters: its --max-loras is 0; start it with "
                "--max-loras of at least 1"
            )
        if self._model is None:
            self._model = resolve(
                config.model, revision=config.model_revision, model_impl=config.model_impl
            ).config
        with hang_limit(READ_DEADLINE_S):
            folder = open_lora(path, self._model, rank_max=config.max_lora_rank)
            return folder.digest(), folder.rank
