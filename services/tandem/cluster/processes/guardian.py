"""Ends all processes of a cluster when its launcher has ended for any reason.

The guardian is run as a script (`python -I -S guardian.py CLUSTER_ID FOLDER ...`). Its standard
input is a pipe from the launcher. The pipe reaches its end (EOF) when the launcher ends. Then the
guardian

1. ends every process that has the cluster's id in its environment
2. ends every other process in the sessions that these processes created, but not in the session of
   the user's shell
3. removes the folders.

The script imports nothing from Tandem, so that it is small and cannot fail.
"""

import os
import shutil
import signal
import sys
import time

CLUSTER_ID_VARIABLE = "TANDEM_CLUSTER_ID"
_TERM_S = 1.5  # seconds between SIGTERM and SIGKILL
_KILL_S = 10.0
_SCAN_INTERVAL_S = 0.05


def cluster_processes(cluster_id: str) -> dict[int, int]:
    """Finds the running processes of a cluster, except this one. Returns pid -> session id."""
    marker = f"{CLUSTER_ID_VARIABLE}={cluster_id}".encode()
    sessions: dict[int, int] = {}
    marked: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        pid = int(entry)
        try:
            with open(f"/proc/{pid}/stat") as stat:
                state, _, _, session = stat.read().rpartition(")")[2].split()[:4]
            if state in "ZX":
                continue
            sessions[pid] = int(session)
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if marker in environ.read().split(b"\0"):
                    marked.add(pid)
        except (OSError, ValueError):  # the process has ended, or belongs to another user
            continue
    # A session of a cluster's process is included as a whole if its leader is a process of the
    # cluster or has ended. Any other leader is the user's shell, and its session also has
    # processes that do not belong to the cluster.
    own = {s for s in map(sessions.__getitem__, marked) if s in marked or s not in sessions}
    own.discard(os.getsid(0))
    return {pid: s for pid, s in sessions.items() if pid in marked or s in own}


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_session(session_id: int) -> None:
    """Sends SIGKILL to every process of a session."""
    pids = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(entry)) == session_id:
                pids.append(int(entry))
        except ProcessLookupError:
            continue
    signal_all(pids, signal.SIGKILL)


def end_cluster(cluster_id: str, term_s: float = _TERM_S, spare: "int | None" = None) -> bool:
    """Ends the processes of a cluster, except the one with the pid `spare`: sends SIGTERM, and
    SIGKILL after `term_s`. Returns False if some processes do not end."""
    term_until = time.monotonic() + term_s
    kill_until = term_until + _KILL_S
    signalled: set[int] = set()
    while pids := [pid for pid in cluster_processes(cluster_id) if pid != spare]:
        now = time.monotonic()
        if now >= kill_until:
            return False
        if now >= term_until:
            signal_all(pids, signal.SIGKILL)
        else:
            signal_all([pid for pid in pids if pid not in signalled], signal.SIGTERM)
            signalled.update(pids)
        time.sleep(_SCAN_INTERVAL_S)
    return True


def main(cluster_id: str, *folders: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    end_cluster(cluster_id)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
