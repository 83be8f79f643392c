"""The folder, logs, environment and guardian of `tandem up` or `tandem join` on its machine.

    made -> ... -> `end`: every process of the cluster on this machine is gone, and the folder too

After a kill of the launcher, its guardian does this.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.cluster.logs.run_logs import RunLogs
from tandem.cluster.processes import guardian, process
from tandem.common.config.cluster import CLUSTER_ID_VARIABLE, TOKEN_VARIABLE
from tandem.net.socket_folder import is_short, make_socket_folder

_DRAIN_S = 2.5  # of routers and workers at the end; all must be gone in 5 s


class Run:
    """One run of a cluster on this machine."""

    def __init__(self, cluster_id: str, token: str, more: Mapping[str, str] | None = None) -> None:
        """`more` has further variables for the environment of all processes."""
        self.cluster_id = cluster_id
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-"))
        # TMPDIR of all processes, whose sockets are there: another folder if this one is too deep.
        self.tmp = self.folder / "tmp"
        if is_short(self.tmp):
            self.tmp.mkdir()
        else:
            self.tmp = make_socket_folder()
        self.logs = RunLogs(self.folder, cluster_id)
        self.guardian = self._start_guardian()
        # Redis inherits our own environment; it must be known as the cluster's, too.
        os.environ[CLUSTER_ID_VARIABLE] = cluster_id
        self.environment = {**process.child_environment(os.environ), **(more or {})}
        self.environment[TOKEN_VARIABLE] = token
        # What a killed process leaves behind goes with the run folder.
        self.environment["TMPDIR"] = str(self.tmp)

    def restart_guardian(self) -> None:
        self.guardian = self._start_guardian()

    def end_processes(self, spare: int | None = None) -> None:
        """Ends the cluster's processes on this machine, except `spare`."""
        guardian.end_cluster(self.cluster_id, _DRAIN_S, spare=spare)

    def end(self) -> None:
        """Removes the run folder. All processes have ended."""
        for folder in (self.folder, self.tmp):
            shutil.rmtree(folder, ignore_errors=True)
        self.logs.close()
        assert self.guardian.stdin is not None
        self.guardian.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.guardian.wait(1.0)

    def _start_guardian(self) -> subprocess.Popen[bytes]:
        script = guardian.__file__
        return subprocess.Popen(
            [sys.executable, "-I", "-S", script, self.cluster_id, str(self.folder), str(self.tmp)],
            stdin=subprocess.PIPE,  # only we hold the other end: it is closed on exec
            env={},
            start_new_session=True,
        )
