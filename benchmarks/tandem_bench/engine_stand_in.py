"""The engine process without a model: the real loop around a pool that is never computed.

`python -m tandem_bench.engine_stand_in`, started by EngineLink. Of services/tandem/worker/
engine_process.py all is real (ZeroMQ, messages, turns, reports, PoolBytes, transfer thread) but
the engine: a sequence gets scattered blocks at once, and one for a peer is "prefilled" in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from tandem.common.perf_model.rates import WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import (
    EngineStats,
    FinalBlocks,
    Mode,
    Prefilled,
    SequenceSpec,
    StepReport,
)
from tandem.errors import InternalError
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess, main
from tandem_bench.pool import fill, pool_memory
from tandem_bench.sizes import layout_of, scattered


@dataclass(frozen=True, slots=True)
class PoolOnly:
    """Stands in for a runner, as far as the engine process needs it."""

    kv: torch.Tensor
    dtype_name: str = "bfloat16"
    numerics_name: str = "fast"
    kernels_name: str = "none"
    num_pools: int = 1
    kv_dtype_name: str = "bfloat16"


class StandInEngine:
    """Stands in for an engine with one sequence at a time, as far as the engine process needs
    it."""

    def __init__(self, layout: KvLayout, order: list[int]) -> None:
        """Each sequence gets the first blocks of `order`."""
        self.layout = layout
        self.max_model_len = layout.num_blocks * layout.block_size
        self.unmeasured_rates = WorkerRates(
            step_tokens=self.max_model_len, block_bytes=layout.block_bytes
        )
        self._order = order
        self._tables: dict[str, list[int]] = {}
        self._report = StepReport()
        self._has_work = False

    def add(self, spec: SequenceSpec) -> None:
        num_blocks = -(-len(spec.token_ids) // self.layout.block_size)
        table = self._order[:num_blocks]
        if len(table) < num_blocks:
            raise InternalError(f"{num_blocks} blocks do not fit a pool of {len(table)}")
        self._tables[spec.sequence_id] = table
        if spec.mode is Mode.PREFILL_ONLY:
            self._report.final_blocks = [FinalBlocks(spec.sequence_id, 0, table)]
            self._report.prefilled = [Prefilled(spec.sequence_id, 1)]
            self._has_work = True

    def remove(self, sequence_id: str, unsafe_blocks: list[int]) -> None:
        self._tables.pop(sequence_id, None)

    def block_ids(self, sequence_id: str) -> list[int]:
        if sequence_id not in self._tables:
            raise InternalError(f"no sequence {sequence_id} is here")
        return self._tables[sequence_id]

    def has_work(self) -> bool:
        return self._has_work

    def awaits_silent_threads(self) -> bool:
        return False

    def step(self, on_final: object) -> StepReport:
        report, self._report = self._report, StepReport()
        self._has_work = False
        return report

    def load(self) -> WorkerLoad:
        return WorkerLoad(num_pulls=len(self._tables), blocks_total=self.layout.num_blocks)

    def stats(self) -> EngineStats:
        return EngineStats()

    def unquarantine(self, block_ids: list[int]) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        pass


class StandInProcess(EngineProcess):
    """`engine.model` of the settings is one of sizes.MODELS; a producer's pool is filled."""

    def _load(
        self, settings: EngineSettings, load_ms: dict[str, float]
    ) -> tuple[ModelRunner, Engine, str]:
        torch.set_num_threads(settings.engine.num_threads)
        assert settings.engine.num_blocks is not None
        layout = layout_of(settings.engine.model, settings.engine.num_blocks)
        is_producer = settings.worker_id == "source"
        memory = pool_memory(layout, settings.pool_fd)
        if is_producer:
            fill(memory)
        kv = torch.from_numpy(memory)
        order = scattered(layout.num_blocks, seed=1 if is_producer else 2)
        engine = StandInEngine(layout, order)
        return cast(ModelRunner, PoolOnly(kv)), cast(Engine, engine), "stand-in"


if __name__ == "__main__":
    main(StandInProcess)
