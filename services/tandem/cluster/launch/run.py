"""The run folder, logs, environment and guardian of `tandem up` or `tandem join`.

A run begins when a `Run` is created. After `end`, the folder and all processes of the cluster on
this machine are gone. If the launcher is killed, the guardian cleans up.
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
from tandem.errors import ConfigError
from tandem.net.socket_folder import is_short, make_socket_folder

_DRAIN_S = 2.5  # time for routers and workers to drain at the end; the whole shutdown may take 5 s


class Run:
    """One run of a cluster on this machine."""

    def __init__(self, cluster_id: str, token: str, more: Mapping[str, str] | None = None) -> None:
        """Creates the folder and starts the guardian. `more` has environment variables for all
        processes."""
        self.cluster_id = cluster_id
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="tandem-"))
        except OSError as error:
            raise ConfigError(
                f"no folder for temporary files can be made ({error.strerror}); free some space, "
                "or name a folder on another disk in the variable TMPDIR"
            ) from error
        # All processes get this folder as TMPDIR and create sockets in it. The path of a socket
        # must be short. So if the path of the run folder is too long, this folder is elsewhere.
        self.tmp = self.folder / "tmp"
        if is_short(self.tmp):
            self.tmp.mkdir()
        else:
            self.tmp = make_socket_folder()
        self.logs = RunLogs(self.folder, cluster_id)
        self.guardian = self._start_guardian()
        # Redis inherits this process's environment. The guardian finds Redis by this variable.
        os.environ[CLUSTER_ID_VARIABLE] = cluster_id
        self.environment = {**process.child_environment(os.environ), **(more or {})}
        self.environment[TOKEN_VARIABLE] = token
        # Killed processes leave files in this folder, which is deleted at the end.
        self.environment["TMPDIR"] = str(self.tmp)

    def restart_guardian(self) -> None:
        self.guardian = self._start_guardian()

    def end_processes(self, spare: int | None = None) -> None:
        """Ends the cluster's processes on this machine, except the one with the pid `spare`."""
        guardian.end_cluster(self.cluster_id, _DRAIN_S, spare=spare)

    def end(self) -> None:
        """Removes the run folder. All processes must have ended before."""
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
            # Only this process has the other end of this pipe, because it is closed on exec. So the
            # guardian reads EOF when this process ends.
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
