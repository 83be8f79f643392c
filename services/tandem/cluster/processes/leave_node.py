"""Drains the workers of a Ray node that is about to end, such as a pod that Kubernetes evicts.

  python -m tandem.cluster.processes.leave_node DEADLINE_S

The program creates the file `leaving` in the run folder and sends SIGTERM to each worker, which
then drains. The program exits when all workers have ended or the deadline has passed.

The program uses neither Ray nor Redis, because the agents of the node may have ended. A keeper that
still runs and finds the file does not restart its worker, and reports to the controller that the
worker drains. Its agent remains until the node ends, so that Ray places nothing else on the node.
The file must be removed before Ray is started on the node again.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tandem.cluster.processes import process
from tandem.common.config.cluster import RUN_FOLDER_VARIABLE
from tandem.common.process import own_files
from tandem.net.observability.logs import configure_logging

log = logging.getLogger(__name__)

MARK = "leaving"


def leaves(run_folder: Path) -> bool:
    """Says whether the node of this run folder is about to end."""
    return (run_folder / MARK).exists()


def leave(run_folder: Path, deadline_s: float) -> list[str]:
    """Drains the processes of the run folder. Returns the ids of those that still run after
    `deadline_s`. Raises OSError if another user may have created the folder."""
    own_files.make_folder(run_folder)
    (run_folder / MARK).touch()
    give_up_at = time.monotonic() + deadline_s
    running = process.find_all(run_folder)
    for each in running:
        log.info("draining %s, because this node is about to end", each.process_id)
        each.send(signal.SIGTERM)
    left = []
    for each in running:
        if not each.wait(max(0.0, give_up_at - time.monotonic())):
            left.append(each.process_id)
        each.close()
    return left


def main(deadline_s: str) -> int:
    configure_logging("leave-node")
    folder = os.environ.get(RUN_FOLDER_VARIABLE, Path(tempfile.gettempdir()) / "tandem")
    if left := leave(Path(folder), float(deadline_s)):
        log.warning(
            "these workers did not finish draining in %s s: %s", deadline_s, ", ".join(left)
        )
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
