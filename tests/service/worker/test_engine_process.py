"""The engine process ends with its I/O process, whenever that dies."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.worker.engine_process.messages import EngineSettings

# Starts an engine process, hands it its settings, and is gone before that one has read them.
_PARENT = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "tandem.worker.engine_process"], stdin=subprocess.PIPE
)
settings = sys.stdin.read().replace('"parent_pid":0', f'"parent_pid":{os.getpid()}')
child.stdin.write(settings.encode())
child.stdin.close()
print(child.pid, flush=True)
os._exit(0)
"""


def test_one_whose_parent_died_while_it_started_ends_too() -> None:
    settings = EngineSettings(
        worker_id="w",
        epoch="1",
        engine=EngineConfig(model="smollm2"),
        transfer=TransferConfig(),
        commands_address="ipc:///nowhere",
        transfers_address="ipc:///nowhere",
        cores=[],
        parent_pid=0,
    )
    # Its standard output is the pipe that is read here: the end of it is the end of both.
    process = subprocess.run(
        [sys.executable, "-c", _PARENT],
        input=msgspec.json.encode(settings).decode(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert process.stdout.strip().isdigit()
