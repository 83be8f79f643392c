"""Starts Ray on one machine: a head with the pool controller, or a node that joins a head.

  python -m tandem.cluster.ray.head RUN_FOLDER [NODE]

NODE is a `RayNode` as JSON. By default, the program starts a head on free ports of 127.0.0.1.

1. The program starts a raylet, and for a head also a GCS.
2. For a head, it prints the line `LISTENING` and waits for a `ClusterSpec` as JSON on standard
   input. The caller may send the spec later. Then the program starts the pool controller.
3. It prints one line of JSON (`HeadStarted`).
4. For a node, it exits, and the raylet remains. For a head, it starts the controller again each
   time the controller ends.

This process imports no Ray, so that it stays small.
"""

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.cluster.processes.process import HEALTHY_AFTER_S, restart_backoff
from tandem.cluster.ray.node import LISTENING, START_DEADLINE_S, HeadStarted, RayNode

_CONTROLLER = "tandem.cluster.ray.controller"


def main(run_folder: Path, node_json: str) -> None:
    node = msgspec.json.decode(node_json, type=RayNode)
    began = time.monotonic()
    command = [sys.executable, "-m", "tandem.cluster.ray.node", str(run_folder), node_json]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the command has logged why
    address, pids = msgspec.json.decode(done.stdout, type=tuple[str, dict[str, int]])
    head_s = time.monotonic() - began
    if node.head_address:
        _print(_encode(HeadStarted(address, pids, head_s, 0.0)))
        return
    _print(LISTENING)
    spec_json = sys.stdin.buffer.read()
    spec_at = time.monotonic()
    controller = _Controller(address, node.address, spec_json)
    controller.wait_ready()
    # The caller watches this process, too, because no other one restarts the controller.
    pids["head process"] = os.getpid()
    _print(_encode(HeadStarted(address, pids, head_s, time.monotonic() - spec_at)))
    controller.keep()


class _Controller:
    """Runs the pool controller in a process of its own, which ends with this process."""

    def __init__(self, gcs_address: str, node_address: str, spec_json: bytes) -> None:
        self._command = [sys.executable, "-m", _CONTROLLER, gcs_address, node_address]
        self._spec_json = spec_json
        self._process = self._start()

    def wait_ready(self) -> None:
        """Waits until the controller has started. Exits if the controller ends before, or after
        `START_DEADLINE_S`."""
        output = self._process.stdout
        assert output is not None
        is_readable, _, _ = select.select([output], [], [], START_DEADLINE_S)
        if not is_readable or not output.readline():
            sys.exit(1)

    def keep(self) -> NoReturn:
        """Starts the controller again each time it ends."""
        backoff = restart_backoff()
        while True:
            started_at = time.monotonic()
            self._process.wait()
            if time.monotonic() - started_at > HEALTHY_AFTER_S:
                backoff.reset()
            time.sleep(backoff.next_s())
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self._command, bufsize=0, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `wait` says so next
            process.stdin.write(self._spec_json + b"\n")
        return process


def _encode(started: HeadStarted) -> bytes:
    return msgspec.json.encode(started) + b"\n"


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "{}")
