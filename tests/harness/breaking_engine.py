"""A worker whose NIXL consumer raises an unexpected error at its first pull; the rest is unchanged.

`python -m tests.harness.breaking_engine worker OPTIONS...` equals `tandem worker OPTIONS`, with
this module as the engine process.
"""

from __future__ import annotations

import sys

from tandem.transfer.reads.messages import Pull
from tandem.worker.__main__ import main as worker_main
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.process import main as engine_main


class BreakingProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        reader = self._transfer._readers["nixl"]
        reader.submit = self._break  # type: ignore[method-assign]

    def _break(self, pull: Pull) -> None:
        raise ZeroDivisionError("a bug at the first pull")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main(__spec__.name)
    else:
        engine_main(BreakingProcess)
