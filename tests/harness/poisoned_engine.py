"""A worker whose engine dies of one token: as a request does that meets a bug in a kernel.

`python -m tests.harness.poisoned_engine worker OPTIONS...` is `python -m services.worker OPTIONS`,
with this module for its engine process.
"""

from __future__ import annotations

import os
import signal
import sys

from services.engine.types import SequenceSpec
from services.worker.engine_process import EngineProcess
from services.worker.engine_process import main as engine_main
from services.worker.settings import EngineSettings
from tests.harness.breaking_engine import worker_main

POISON = 49_151  # the last token of SmolLM2's vocabulary: no prompt of ours has it


class PoisonedProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        add = self._engine.add

        def add_or_die(spec: SequenceSpec) -> None:
            if POISON in spec.token_ids[: spec.num_prompt_tokens]:
                os.kill(os.getpid(), signal.SIGKILL)
            add(spec)

        self._engine.add = add_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main("tests.harness.poisoned_engine")
    else:
        engine_main(PoisonedProcess)
