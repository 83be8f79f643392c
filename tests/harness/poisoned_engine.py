"""A worker whose engine process dies at one token, like a request that triggers a bug in a kernel.

`python -m tests.harness.poisoned_engine worker OPTIONS...` equals `tandem worker OPTIONS`, with
this module as the engine process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch

from tandem.engine.scheduler.batch import StepBatch
from tandem.worker.__main__ import main as worker_main
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.process import main as engine_main

POISON = 49_151  # the last token of SmolLM2's vocabulary, which is in no other prompt of the tests


class PoisonedProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        forward = self._runner.forward

        def forward_or_die(batch: StepBatch, on_kv_written: Callable[[], object]) -> torch.Tensor:
            if any(POISON in each.token_ids for each in batch.slices):
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(batch, on_kv_written)

        self._runner.forward = forward_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main(__spec__.name)
    else:
        engine_main(PoisonedProcess)
