"""A worker whose engine slows down steps that only decode, so that tests can act in mid-stream.

`python -m tests.harness.slow_engine worker OPTIONS...` equals `tandem worker OPTIONS`, with this
module as the engine process. While the file named by HOLD_VARIABLE exists, steps take ten times as
long, so that tests on a busy machine can still act in mid-stream. If this variable is not set, the
engine is as fast as another one.

If the environment has ALWAYS_VARIABLE, steps verify all proposed tokens, whatever they cost.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

from tandem.common.perf_model.step_time import StepWork
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.speculation.speculator import Speculator
from tandem.worker.__main__ import main as worker_main
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.process import main as engine_main
from tests.scripted_drafts import always_draft

STEP_S = 0.02
HELD_STEP_S = 0.2
HOLD_VARIABLE = "TANDEM_TEST_HOLD"
ALWAYS_VARIABLE = "TANDEM_TEST_ALWAYS_SPECULATES"


def num_all(speculator: Speculator, gains: Sequence[float], work: StepWork) -> int:
    """Takes the place of `Speculator.num_worthwhile`."""
    return len(gains)


class SlowProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        if ALWAYS_VARIABLE in os.environ:
            Speculator.num_worthwhile = num_all  # type: ignore[method-assign]
            if self._engine._draft_model is not None:
                always_draft(self._engine)
        forward = self._runner.forward
        hold = os.environ.get(HOLD_VARIABLE)
        if hold is None:
            return

        def forward_slowly(batch: StepBatch, on_kv_written: Callable[[], object]) -> torch.Tensor:
            if all(len(each.token_ids) == 1 + each.num_drafts for each in batch.slices):
                time.sleep(HELD_STEP_S if os.path.exists(hold) else STEP_S)
            return forward(batch, on_kv_written)

        self._runner.forward = forward_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main(__spec__.name)
    else:
        engine_main(SlowProcess)
