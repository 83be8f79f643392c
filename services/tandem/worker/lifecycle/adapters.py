"""The LoRA adapters that this worker serves by name: those of `--lora`, and what operators add.

A name stands in the worker's record until an operator removes it or the worker ends. A new worker
adopts the names of the others, so that a rolling restart loses none. The weights are the engine's
business: it reads them when the first sequence wants them. A process that hangs while it reads a
folder ends, and the worker with it.
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
from tandem.engine.types import AdapterLoad
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig
from tandem.models.lora.adapter import WEIGHTS_FILE, open_lora
from tandem.models.source import resolve
from tandem.net.store.registry import AdapterState, WorkerRecord
from tandem.worker.metrics.adapters import adapter_metrics

log = logging.getLogger(__name__)


class NamedAdapters:
    """The adapters that a worker serves. `named` go into its record. Threads read the files."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: ModelConfig | None = None
        self.named: dict[str, Adapter] = {}
        self.load = AdapterLoad()  # of the engine, as it last told
        self._has_adopted = False
        self._turn = asyncio.Lock()  # of the reader of a folder

    @property
    def state(self) -> AdapterState:
        """Returns what the worker's record tells of its adapters."""
        rank_max = self._config.max_lora_rank if self._config.max_loras else 0
        named = list(self.named.values())
        return AdapterState(named, self.load.loaded, self.load.failed, rank_max)

    def metrics(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Returns the gauge of the engine's adapters."""
        return adapter_metrics(labels, self.load, self._config.max_loras)

    async def read_own(self) -> None:
        """Takes in those of `--lora`. Raises ConfigError naming the one that cannot be used."""
        for name, path in self._config.lora.items():
            try:
                async with self._turn:
                    self.add(await asyncio.to_thread(self._read_own, name, path))
            except ConfigError as error:
                raise type(error)(f"lora {name}: {error.message}") from error

    def adopt(self, records: Iterable[WorkerRecord]) -> None:
        """Takes in what ready workers serve when this one sees them first, and only then: what an
        operator removes later is gone."""
        if self._has_adopted:
            return
        self._has_adopted = True
        named = [each for r in records if r.state == "ready" for each in r.adapters.named]
        for adapter in sorted(named, key=lambda each: each.added_at):
            known = self.named.get(adapter.name)
            if known is None or known.added_at < adapter.added_at:
                self.add(adapter)

    async def describe(self, path: str) -> tuple[str, int]:
        """Returns digest and rank of an adapter's folder. Raises ConfigError if this worker cannot
        use it."""
        async with self._turn:
            return await asyncio.to_thread(self._describe, path)

    def add(self, adapter: Adapter) -> None:
        """Serves an adapter, in place of one that has its name."""
        log.info("adapter %s is %s of %s", adapter.name, adapter.digest, adapter.path)
        self.named[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Serves no adapter of this name any more."""
        if self.named.pop(name, None) is not None:
            log.info("adapter %s is served no more", name)

    def _read_own(self, name: str, path: str) -> Adapter:
        digest, rank = self._describe(path)
        # Of two workers that start with one name, the one with the newer files counts.
        return Adapter(name, digest, path, rank, (Path(path) / WEIGHTS_FILE).stat().st_mtime)

    def _describe(self, path: str) -> tuple[str, int]:
        config = self._config
        if not config.max_loras:
            raise ConfigError("this worker has no adapters: its max-loras is 0")
        if self._model is None:
            self._model = resolve(config.model, revision=config.model_revision).config
        with hang_limit(READ_DEADLINE_S):
            folder = open_lora(path, self._model, rank_max=config.max_lora_rank)
            return folder.digest(), folder.rank
