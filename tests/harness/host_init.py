"""The first process of a simulated host: `python -m tests.harness.host_init COMMAND...`.

It runs in new PID, IPC and mount namespaces. It mounts separate shared memory, starts the command,
forwards SIGTERM and SIGINT, and reaps orphans like the init of a machine.
"""

import os
import signal
import subprocess
import sys


def main(*command: str) -> int:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm"], check=True)
    started = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: started.send_signal(number))
    while True:
        pid, status = os.wait()
        if pid == started.pid:
            return os.waitstatus_to_exitcode(status) & 255


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
