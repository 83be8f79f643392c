"""A worker whose NIXL consumer raises an unexpected error at its first pull; the rest is unchanged.

`python -m tests.harness.breaking_engine worker OPTIONS...` equals `tandem worker OPTIONS`, with
this module as the engine process.
"""

from __future__ import annotations

import sys
from functools import partial

from tandem.transfer.nixl.consumer import NixlConsumer
from tandem.transfer.nixl.messages import Pull
from tandem.worker.engine_process.messages import EngineSettings
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.process import main as engine_main


class BreakingProcess(EngineProcess):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        consumer = self._transfer._transport
        assert isinstance(consumer, NixlConsumer)
        consumer.submit = self._break  # type: ignore[method-assign]

    def _break(self, pull: Pull) -> None:
        raise ZeroDivisionError("a bug at the first pull")


def worker_main(engine_module: str) -> None:
    from tandem.worker import __main__ as command
    from tandem.worker.lifecycle import worker

    worker.EngineLink = partial(  # type: ignore[assignment, misc]
        worker.EngineLink, engine_module=engine_module
    )
    command.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        worker_main("tests.harness.breaking_engine")
    else:
        engine_main(BreakingProcess)
