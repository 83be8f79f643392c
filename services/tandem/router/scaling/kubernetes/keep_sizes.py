"""Keeps the sizes of pools during an upgrade of the chart. A Job runs this before the upgrade.

    python -m tandem.router.scaling.kubernetes.keep_sizes statefulsets/NAME=2 deployments/NAME=3
Each argument is RESOURCE/NAME of an object, with the chart's value of `replicas` after `=`. An
argument without a value is an object whose size the chart does not set.

Without this program, an upgrade would reset the size of a pool that an operator or the autoscaler
has scaled. In Kubernetes' server-side apply, each field of an object is owned by field managers,
such as Helm. If the only manager of the size no longer states a size, the size falls back to 1. If
another manager states a different size, that manager gets a conflict. So this program sets the size
of each object as the manager `tandem-size`, and the chart states no size.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#transferring-ownership

All worker groups of a RayCluster are a single field. Ray's autoscaler patches the number of
replicas of one group and thereby owns this field, so the chart gets a conflict. For
rayclusters/NAME, this program removes the field from every manager that has patched it. The chart
then states the present numbers of replicas, with which Ray's autoscaler continues.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from lightkube import Client
from lightkube.types import PatchType

from tandem.common.config.router import SERVICE_ACCOUNT
from tandem.errors import DeadlineExceeded, ScaleAway, TandemError
from tandem.router.scaling.kubernetes.client import (
    UNREADABLE,
    answer_of,
    open_client,
    resource_and_name,
)

log = logging.getLogger(__name__)

MANAGER = "tandem-size"
SURGE = "tandem-surge"  # field manager that adds one replica during an upgrade (surge.py)
REPLICAS_ANNOTATION = "tandem.dev/replicas"  # annotation with the chart's last value of `replicas`
_RAY_CLUSTERS = "rayclusters/"
_WORKER_GROUPS = "f:workerGroupSpecs"
LATE = 3  # exit status of a Job that missed its deadline; a retry would miss the deadline, too
# Number of tries to change an object. A try fails if the object has changed since it was read.
_ATTEMPTS = 10


def kept_size(live: Mapping[str, Any], replicas: int | None) -> int:
    """Returns the size of an object after the upgrade.

    The present size is kept unless the chart's value `replicas` has changed since the last upgrade.
    For example, the chart said 2, and an operator has set 5. The size stays 5 if the chart still
    says 2, and becomes 3 if the chart now says 3.

    If no annotation records the chart's last value, the present size is kept only if a manager has
    set the size through the object's scale, as `kubectl scale` does. The chart's template
    `tandem.replicas` has the same rule. A replica that an earlier upgrade has added and not removed
    (surge.py) is not counted.
    """
    current = int(live["spec"]["replicas"]) - is_surged(live)
    noted = live["metadata"].get("annotations", {}).get(REPLICAS_ANNOTATION)
    if replicas is None or noted == str(replicas):
        return current
    return current if noted is None and _scalers(live) else replicas


def is_surged(live: Mapping[str, Any]) -> bool:
    """Returns whether one of an object's replicas exists only for an upgrade.

    Such a replica was added by surge.py. If another manager has set a size since, the result is
    False, because the replica is then part of that size.
    """
    return SURGE in _scalers(live)


def _scalers(live: Mapping[str, Any]) -> set[str]:
    """Returns the field managers that have set an object's size through its scale."""
    return {
        entry["manager"]
        for entry in live["metadata"].get("managedFields", [])
        if entry.get("subresource") == "scale"
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }


def read_objects(words: Sequence[str]) -> dict[str, int | None]:
    """Parses arguments RESOURCE/NAME=VALUE to a map from RESOURCE/NAME to the chart's value.

    Raises ValueError if a value is not a number.
    """
    pairs = (word.partition("=") for word in words)
    return {owner: int(value) if value else None for owner, _, value in pairs}


def without_patches(managers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a RayCluster's `managedFields`, in which managers that have patched the worker groups
    no longer own them. Managers that have applied the worker groups still own them."""
    kept = []
    for entry in deepcopy([dict(entry) for entry in managers]):
        spec = entry.get("fieldsV1", {}).get("f:spec", {})
        if entry.get("operation") == "Update" and _WORKER_GROUPS in spec:
            del spec[_WORKER_GROUPS]
            if not spec:
                del entry["fieldsV1"]["f:spec"]
            if not entry["fieldsV1"]:
                continue
        kept.append(entry)
    return kept


def keep_sizes(client: Client, objects: Mapping[str, int | None]) -> None:
    """Makes this program the owner of the sizes of `objects`, so that the upgrade keeps the sizes.

    Objects that do not exist yet are skipped. Raises ScaleAway if the API server refuses a change
    or cannot be reached.
    """
    for owner, replicas in objects.items():
        if owner.startswith(_RAY_CLUSTERS):
            free_groups(client, owner)
        else:
            set_size(client, owner, partial(kept_size, replicas=replicas), MANAGER)


def free_groups(client: Client, owner: str) -> None:
    """Ends the ownership of managers that have patched the worker groups of a RayCluster.

    `owner` is rayclusters/NAME. Raises the errors of `keep_sizes`.
    """
    resource, name = resource_and_name(owner)
    for _ in range(_ATTEMPTS):
        live = read_object(client, owner)
        if live is None:
            return
        managers = live["metadata"].get("managedFields", [])
        if (kept := without_patches(managers)) == managers:
            return
        version = live["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version, "managedFields": kept}}
        with _unless(409, owner):
            client.patch(resource, name, patch, patch_type=PatchType.MERGE)
            log.info(
                "%s: removed the field managers that had patched the worker groups from "
                "managedFields; the upgrade can now change the worker groups",
                owner,
            )
            return
    raise ScaleAway(
        f"{owner} cannot be changed, because other programs changed it during each of {_ATTEMPTS} "
        "attempts; try again"
    )


def set_size(
    client: Client,
    owner: str,
    choose: Callable[[Mapping[str, Any]], int | None],
    manager: str,
) -> int | None:
    """Applies the size that `choose` returns for an object, as the field manager `manager`.

    Returns the size; None if the object does not exist or `choose` returns None. Raises the errors
    of `keep_sizes`.
    """
    resource, name = resource_and_name(owner)
    for _ in range(_ATTEMPTS):
        live = read_object(client, owner)
        size = None if live is None else choose(live)
        if live is None or size is None:
            return None
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "resourceVersion": live["metadata"]["resourceVersion"]},
            "spec": {"replicas": size},
        }
        with _unless(409, f"{owner}/scale"):
            client.patch(
                resource.Scale,
                name,
                scale,
                patch_type=PatchType.APPLY,
                field_manager=manager,
                force=True,
            )
            log.info("the size of %s was set to %d replicas", owner, size)
            return size
    raise ScaleAway(
        f"the size of {owner} cannot be set, because other programs changed {owner} during each of "
        f"{_ATTEMPTS} attempts; try again"
    )


def read_object(client: Client, owner: str) -> dict[str, Any] | None:
    """Returns an object, or None if it does not exist. Raises the errors of `keep_sizes`."""
    resource, name = resource_and_name(owner)
    with _unless(404, owner):
        live: dict[str, Any] = client.get(resource, name).to_dict()
        return live
    log.info("this job skips %s, which does not exist yet", owner)
    return None


@contextmanager
def _unless(status: int, owner: str) -> Iterator[None]:
    """Suppresses the HTTP error `status` in the `with` block; other errors become ScaleAway."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        if error.response.status_code != status:
            raise ScaleAway(answer_of(error, owner)) from error
    except httpx2.HTTPError as error:
        raise ScaleAway(f"the Kubernetes API server cannot be reached: {error!r}") from error
    except UNREADABLE as error:
        raise ScaleAway(f"{owner}: the API server's answer cannot be read: {error!r}") from error


def run(client: Client, words: Sequence[str]) -> None:
    """Runs the program with its arguments. Raises the errors of `keep_sizes`."""
    keep_sizes(client, read_objects(words))


def run_job(run: Callable[[Client, Sequence[str]], None]) -> int:
    """Runs a Job's program against the API server of its pod; returns the exit status.

    Status 1 stops the upgrade, and a retry may help. Status LATE (3) stops the upgrade, and a retry
    does not help.
    """
    try:
        with open_client(Client, Path(SERVICE_ACCOUNT)) as client:
            run(client, sys.argv[1:])
    except TandemError as error:
        log.error(
            "this attempt of the job failed: %s. The upgrade fails if all attempts fail",
            error.message,
        )
        return LATE if isinstance(error, DeadlineExceeded) else 1
    return 0


def main() -> int:
    """Runs the program; returns the exit status of `run_job`.

    The Job runs before the upgrade, so a failure stops the upgrade before it changes anything.
    """
    from tandem.net.observability.logs import configure_logging

    configure_logging("keep-sizes")
    return run_job(run)


if __name__ == "__main__":
    sys.exit(main())
