"""A worker whose host tier gives no block while a file exists, so that tests can act during a load.

`python -m tests.harness.slow_tier worker OPTIONS...` equals `tandem worker OPTIONS`, with this
module as the engine process. While the file named by HOLD_VARIABLE exists, reads of the tier wait,
and the first one creates the file of the same name with `.read` appended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tandem.engine import peer_blocks
from tandem.engine.tiers.storage import Bytes
from tandem.worker.__main__ import main as worker_main
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.process import main as engine_main

HOLD_VARIABLE = "TANDEM_TEST_HOLD"


class SlowTierProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        peer_blocks._PATIENCE_MIN_S = 60.0  # the consumer gives up, and not this worker
        hold = Path(os.environ[HOLD_VARIABLE])
        storage = self._engine._tiers.tiers[0].storage
        read = storage.read

        def read_later(slot: int, block_hash: bytes, target: Bytes) -> None:
            while hold.exists():
                hold.with_name(f"{hold.name}.read").touch()
                time.sleep(0.02)
            read(slot, block_hash, target)

        storage.read = read_later  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main(__spec__.name)
    else:
        engine_main(SlowTierProcess)
