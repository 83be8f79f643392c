"""Adds a second worker to each pool of one worker while the chart is upgraded. Two Jobs run this.

    python -m tandem.router.scaling.kubernetes.surge add SECONDS statefulsets/NAME ...
    python -m tandem.router.scaling.kubernetes.surge end SECONDS statefulsets/NAME ...
`add` runs before the upgrade and changes the size from 1 to 2 as the field manager `tandem-surge`.
`end` runs after the upgrade and changes the size back to 1. If another field manager has set a size
meanwhile, `end` keeps that size.

The only state of the Jobs is the field manager of the size in Kubernetes, so a restarted Job can
continue. If an upgrade fails and leaves an added worker, the next upgrade removes that worker
(keep_sizes.py).

A StatefulSet replaces its pods one after another. The first is the pod with the highest ordinal,
which is the added worker. The other pod is replaced only when the added worker is ready again. So
one of the two workers is ready at any time.
https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#rolling-updates
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightkube import Client

from tandem.errors import DeadlineExceeded, ScaleAway
from tandem.router.scaling.kubernetes.keep_sizes import (
    MANAGER,
    SURGE,
    is_surged,
    read_object,
    run_job,
    set_size,
)

log = logging.getLogger(__name__)

_POLL_S = 1.0


def add(client: Client, owners: Sequence[str], deadline_s: float) -> None:
    """Adds a worker to each pool of one ready worker and waits until the added workers are ready.

    A pool whose only worker is not ready gets no added worker. Such a pool serves nothing anyway,
    and the upgrade may repair it. The function does not wait for a pool that is still being changed
    to another revision, because a worker of that revision may never become ready.

    If an added worker is not ready in time, all added workers are removed and DeadlineExceeded is
    raised. The errors of `set_size` are raised, too.
    """
    for owner in owners:
        set_size(client, owner, _one_more, SURGE)
    if late := _wait(client, owners, _is_added, deadline_s):
        _take_back(client, owners)
        raise DeadlineExceeded(
            f"{' and '.join(late)}: the added worker was not ready within {deadline_s:g} s, "
            "so this upgrade removes all added workers. Check that the cluster has room for "
            "one more worker of each pool"
        )


def end(client: Client, owners: Sequence[str], deadline_s: float) -> None:
    """Removes the added workers after all workers of their pools have been replaced.

    Raises DeadlineExceeded if the replacement takes too long. The added workers of the late pools
    then stay, because the controller would otherwise replace the only worker that serves.
    """
    late = _wait(client, owners, _is_replaced, deadline_s)
    _take_back(client, [owner for owner in owners if owner not in late])
    if late:
        raise DeadlineExceeded(
            f"{' and '.join(late)}: the upgrade did not replace all workers within "
            f"{deadline_s:g} s, so the extra worker that the upgrade had added stays. The "
            "next upgrade removes the extra worker; to remove it now, set the pool's size to "
            "1"
        )


def _take_back(client: Client, owners: Iterable[str]) -> None:
    for owner in owners:
        set_size(client, owner, _one_less, MANAGER)


def _one_more(live: Mapping[str, Any]) -> int | None:
    is_one = live["spec"]["replicas"] == 1 and live.get("status", {}).get("readyReplicas", 0) > 0
    return 2 if is_one or is_surged(live) else None


def _one_less(live: Mapping[str, Any]) -> int | None:
    return int(live["spec"]["replicas"]) - 1 if is_surged(live) else None


def _is_ready(live: Mapping[str, Any]) -> bool:
    status = live.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
    return bool(is_seen and status.get("readyReplicas", 0) >= live["spec"]["replicas"])


def _is_added(live: Mapping[str, Any]) -> bool:
    status = live.get("status", {})
    return _is_ready(live) or status.get("currentRevision") != status.get("updateRevision")


def _is_replaced(live: Mapping[str, Any]) -> bool:
    """Returns whether all pods have the new revision and are ready.

    The StatefulSet's controller sets the current revision to the new revision only then.
    """
    status = live.get("status", {})
    return _is_ready(live) and status.get("currentRevision") == status.get("updateRevision")


def _wait(
    client: Client,
    owners: Sequence[str],
    done: Callable[[Mapping[str, Any]], bool],
    deadline_s: float,
) -> list[str]:
    """Waits until `done` returns True for each pool that has an added worker.

    Returns the pools for which `done` still returns False at the deadline. Errors of the API server
    are retried.
    """
    give_up_at = time.monotonic() + deadline_s
    left = list(owners)
    while left := [owner for owner in left if not _holds(client, owner, done)]:
        if time.monotonic() > give_up_at:
            break
        time.sleep(_POLL_S)
    return left


def _holds(client: Client, owner: str, done: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        live = read_object(client, owner)
    except ScaleAway as error:
        log.warning("reading %s failed and is tried again: %s", owner, error.message)
        return False
    return live is None or not is_surged(live) or done(live)


def run(client: Client, words: Sequence[str]) -> None:
    """Runs the program with its arguments. Raises the errors of `add` and `end`."""
    step, deadline_s, *owners = words
    {"add": add, "end": end}[step](client, owners, float(deadline_s))


def main() -> int:
    """Runs the program; returns the exit status of `run_job`."""
    from tandem.net.observability.logs import configure_logging

    configure_logging("surge")
    return run_job(run)


if __name__ == "__main__":
    sys.exit(main())
