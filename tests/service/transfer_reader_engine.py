"""The engine process of a consumer under test: the bench's stand-in, with blocks in quarantine.

Real are the process, its ledger and its transfer thread. A sequence gets the first blocks that
nobody holds and that no read may still write.
"""

from __future__ import annotations

from typing import cast

from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.types import EngineLoad, Reserved, SequenceSpec
from tandem.errors import QueueFull
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import main
from tandem_bench.engine_stand_in import StandInEngine, StandInProcess


class PoolEngine(StandInEngine):
    def __init__(self, stand_in: StandInEngine) -> None:
        super().__init__(stand_in.layout, stand_in._order)
        self._quarantine: set[int] = set()

    def add(self, spec: SequenceSpec) -> None:
        taken = {block for table in self._tables.values() for block in table} | self._quarantine
        num_blocks = len(spec.token_ids) // self.layout.block_size
        table = [block for block in self._order if block not in taken][:num_blocks]
        if len(table) < num_blocks:
            raise QueueFull(f"there are not {num_blocks} blocks")
        self._tables[spec.sequence_id] = table
        self._report.reserved = [*self._report.reserved, Reserved(spec.sequence_id, 0, table)]
        self._has_work = True

    def remove(self, sequence_id: str, unsafe_blocks: list[int]) -> None:
        self._tables.pop(sequence_id, None)
        self._quarantine.update(unsafe_blocks)

    def unquarantine(self, block_ids: list[int]) -> None:
        assert self._quarantine.issuperset(block_ids)
        self._quarantine.difference_update(block_ids)

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_awaiting_kv=len(self._tables), blocks_quarantined=len(self._quarantine)
        )

    def check_integrity(self) -> None:
        assert not self._tables, f"{list(self._tables)} are here"
        assert not self._quarantine, f"{len(self._quarantine)} blocks are in quarantine"


class ConsumerProcess(StandInProcess):
    def _load(
        self, settings: EngineSettings, load_ms: dict[str, float]
    ) -> tuple[ModelRunner, Engine, str]:
        runner, stand_in, fingerprint = super()._load(settings, load_ms)
        return runner, cast(Engine, PoolEngine(cast(StandInEngine, stand_in))), fingerprint


if __name__ == "__main__":
    main(ConsumerProcess)
