"""Starts a command that outlives its caller: `detach.py RECORD LOG COMMAND...`.

The caller may be a Ray actor. When an actor ends, Ray kills its child processes. So the command
must not be a child of the caller: this script starts the command in a new session and exits
immediately.

RECORD is the path of a file. The script writes a JSON object with `pid` and `start_ticks` to it
before the command runs and before the script exits. LOG is a file for the output of the command.

The file is run as a script (`python -I -S`) and imports nothing from Tandem.
"""

import os
import sys


def start_ticks(pid: int) -> int:
    """Reads the start time of a process in clock ticks since boot. A pid alone does not identify a
    process, because Linux reuses pids; the pid and the start time together do."""
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


def main(record: str, log: str, *command: str) -> None:
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        # The child's end of the pipe is closed without data as soon as exec succeeds. If exec
        # fails, the child writes its error message to the pipe.
        failed = os.read(read_end, 1000)
        sys.stderr.buffer.write(failed)
        sys.exit(1 if failed else 0)
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        pid = os.getpid()
        with open(f"{record}.{pid}", "w") as stream:
            stream.write(f'{{"pid": {pid}, "start_ticks": {start_ticks(pid)}}}')
        os.replace(f"{record}.{pid}", record)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(write_end, f"{command[0]} cannot be started: {error}".encode())
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
