"""An engine process whose first tier gives blocks at a bandwidth: TIER_BYTES_PER_S, for benchmarks.

`python -m benchmarks.tiers.slow_engine` runs instead of a worker's own engine process. With
TIER_STAYS, a reset of the prefix cache empties the pool and leaves the tier.
"""

from __future__ import annotations

import os
import time

from tandem.engine.tiers.storage import Bytes
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess, main

BYTES_PER_S = "TIER_BYTES_PER_S"
STAYS = "TIER_STAYS"


class SlowTierProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        bytes_per_s = float(os.environ[BYTES_PER_S])
        storage = self._engine._tiers.tiers[0].storage
        read = storage.read

        def slow_read(slot: int, block_hash: bytes, target: Bytes) -> None:
            until = time.perf_counter() + target.nbytes / bytes_per_s
            read(slot, block_hash, target)
            time.sleep(max(0.0, until - time.perf_counter()))

        storage.read = slow_read  # type: ignore[method-assign]
        if os.environ.get(STAYS):
            self._engine.reset_prefix_cache = self._engine._kv.drop_cached  # type: ignore[method-assign]


if __name__ == "__main__":
    main(SlowTierProcess)
