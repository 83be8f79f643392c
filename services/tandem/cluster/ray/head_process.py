"""Runs Ray's head, and replaces a head that has ended.

1. `start` starts a process (head.py), which starts GCS and raylet. When both are up, `is_listening`
   becomes True.
2. `send_spec` sends the spec to the process, which then starts the pool controller.
3. `started` returns the data of the head. The process of step 1 then restarts the controller when
   it ends. If it has started a node, it exits, and the node continues.

If GCS, raylet or the process of step 1 ends, the caller calls `start` again. `start` first kills
the rest of the old head. Otherwise the old controller and the agents could live for another minute,
take scale requests away from the new controller, and start processes twice. All Ray processes and
the controller are in the session of the process of step 1, and `end` kills this session.
"""

import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.cluster.pools import ClusterSpec
from tandem.cluster.processes import guardian
from tandem.cluster.processes.process import failed_start
from tandem.cluster.ray.node import LISTENING, HeadStarted, RayNode, head_environment


class HeadProcess:
    """Runs one head at a time, or one node that joins the head of another host."""

    def __init__(
        self, run_folder: Path, environment: Mapping[str, str], node: RayNode | None = None
    ) -> None:
        """Prepares a head or node. `environment` has the cluster's variables."""
        self._run_folder = run_folder
        self._node = node or RayNode()
        self._log = run_folder / "ray_head.log"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.is_listening = False  # True once GCS and raylet are up; updated by `started`

    @property
    def pid(self) -> int:
        """Pid of the process that starts the head. It is also the id of the session of all Ray
        processes."""
        assert self._process is not None
        return self._process.pid

    @property
    def output_fd(self) -> int:
        """Descriptor of the output of the process that starts the head. It can be read when
        `started` has more to return."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def has_spec(self) -> bool:
        """True once the spec was sent to the running head."""
        return self._process is not None and bool(
            self._process.stdin and self._process.stdin.closed
        )

    @property
    def is_started(self) -> bool:
        """True if a head or node is running or starting."""
        return self._process is not None

    def join(self, head_address: str) -> None:
        """Starts a node that joins the head of another host. Returns immediately."""
        self._start(msgspec.structs.replace(self._node, head_address=head_address))
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    def start(self, spec: ClusterSpec | None = None) -> None:
        """Starts a head and returns immediately. Without `spec`, the head waits for `send_spec`."""
        self._start(self._node)
        if spec is not None:
            self.send_spec(spec)

    def _start(self, node: RayNode) -> None:
        self.end()
        self.is_listening = False
        module = "tandem.cluster.ray.head"
        node_json = msgspec.json.encode(node).decode()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._run_folder), node_json],
                env=head_environment(self._environment, self._run_folder, node),
                cwd=self._run_folder,
                bufsize=0,  # Unbuffered, because `select` would miss a buffered second line.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def send_spec(self, spec: ClusterSpec) -> None:
        """Sends the spec to the starting head, which then starts the pool controller. Does nothing
        if the head has already ended; `started` then raises an error with the reason."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(spec))

    def started(self, timeout_s: float = 0.0) -> HeadStarted | None:
        """Returns the head's data once it is up, else None. Raises ConfigError if the start failed.
        Waits up to `timeout_s` for each line of output."""
        assert self._process is not None
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], timeout_s)[0]:
            if not (line := self._process.stdout.readline()):
                raise failed_start("Ray's head", self._log)
            if line != LISTENING:
                return msgspec.json.decode(line, type=HeadStarted)
            self.is_listening = True
        return None

    def end(self) -> None:
        """Kills all processes of the head at the same time. A controller or an agent that survived
        would restart workers and routers that the caller ends next."""
        if self._process is None:
            return
        guardian.end_session(self._process.pid)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process = None
