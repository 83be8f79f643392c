"""Keeps the sizes of pools during an upgrade of the chart. A Job runs this before the upgrade.

    python -m tandem.router.scaling.keep_sizes statefulsets/NAME=2 deployments/NAME=3
Each argument is RESOURCE/NAME of an object, with the chart's value of `replicas` after `=`. Without
a value, something other than the chart owns the size. For a RayCluster (rayclusters/NAME) whose
pools Ray's autoscaler has scaled, the upgrade may then change the pools (free_groups.py).
In server-side apply, a size falls back to 1 when the only manager that owns the field stops stating
it, and a manager that applies a different size gets a conflict. This program applies the scale of
each object as the manager `tandem-size`, so that the chart need not state a size.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#transferring-ownership
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.common.config.router import SERVICE_ACCOUNT
from tandem.errors import DeadlineExceeded, ScaleAway, TandemError
from tandem.router.scaling.free_groups import RAY_CLUSTERS, free_groups
from tandem.router.scaling.kubernetes import answer_of, open_client

log = logging.getLogger(__name__)

MANAGER = "tandem-size"
SURGE = "tandem-surge"  # owns a size that is one larger during an upgrade (surge.py)
REPLICAS_ANNOTATION = "tandem.dev/replicas"  # annotation with the chart's last value of `replicas`
_APPLY = {"Content-Type": "application/apply-patch+yaml"}  # JSON is valid YAML
LATE = 3  # exit status of a Job that would miss its deadline again
_ATTEMPTS = 10  # an object changes often while its pods start


def kept_size(live: Mapping[str, Any], replicas: int | None) -> int:
    """Returns the size of an object after the upgrade.

    It is the present size unless the chart's value `replicas` has changed. If the chart did not
    record the value, a size that was set by the object's scale is kept. The chart's template
    `tandem.replicas` has the same rule. A worker that an earlier upgrade added and left is not
    counted.
    """
    current = int(live["spec"]["replicas"]) - is_surged(live)
    noted = live["metadata"].get("annotations", {}).get(REPLICAS_ANNOTATION)
    if replicas is None or noted == str(replicas):
        return current
    return current if noted is None and _scalers(live) else replicas


def is_surged(live: Mapping[str, Any]) -> bool:
    """Returns whether one of an object's replicas exists only for an upgrade.

    That ends when another manager sets a size.
    """
    return SURGE in _scalers(live)


def _scalers(live: Mapping[str, Any]) -> set[str]:
    """Returns the field managers that own an object's size by its scale."""
    return {
        entry["manager"]
        for entry in live["metadata"].get("managedFields", [])
        if entry.get("subresource") == "scale"
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }


def read_objects(words: Sequence[str]) -> dict[str, int | None]:
    """Returns the chart's value of each RESOURCE/NAME. Raises ValueError if one is no number."""
    pairs = (word.partition("=") for word in words)
    return {owner: int(value) if value else None for owner, _, value in pairs}


async def keep_sizes(client: httpx.AsyncClient, objects: Mapping[str, int | None]) -> None:
    """Takes over the sizes of these objects. Objects that do not exist yet are skipped.

    Raises ScaleAway, or httpx.HTTPError if the API server cannot be reached.
    """
    for owner, replicas in objects.items():
        if owner.startswith(RAY_CLUSTERS):
            await free_groups(client, owner)
            continue
        await set_size(client, owner, partial(kept_size, replicas=replicas), MANAGER)


async def set_size(
    client: httpx.AsyncClient,
    owner: str,
    choose: Callable[[Mapping[str, Any]], int | None],
    manager: str,
) -> int | None:
    """Applies the size that `choose` returns for an object, as the field manager `manager`.

    Returns the size; None if the object does not exist or `choose` returns None. Raises the errors
    of `keep_sizes`.
    """
    for _ in range(_ATTEMPTS):
        live = await read_object(client, owner)
        size = None if live is None else choose(live)
        if live is None or size is None:
            return None
        if await _apply(client, owner, live, size, manager):
            log.info("%s: %d replicas", owner, size)
            return size
    raise ScaleAway(f"{owner} changed while its size was read, {_ATTEMPTS} times")


async def read_object(client: httpx.AsyncClient, owner: str) -> dict[str, Any] | None:
    """Returns an object, or None if it does not exist. Raises the errors of `keep_sizes`."""
    reply = await client.get(owner)
    if reply.status_code == 404:
        log.info("%s: not there yet", owner)
        return None
    if reply.status_code != 200:
        raise ScaleAway(answer_of(reply, owner))
    return msgspec.json.decode(reply.content, type=dict[str, Any])


async def _apply(
    client: httpx.AsyncClient, owner: str, live: Mapping[str, Any], size: int, manager: str
) -> bool:
    """Applies a size; returns False if the object has changed meanwhile."""
    scale = {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            "name": live["metadata"]["name"],
            "resourceVersion": live["metadata"]["resourceVersion"],
        },
        "spec": {"replicas": size},
    }
    reply = await client.patch(
        f"{owner}/scale",
        params={"fieldManager": manager, "force": "true"},
        headers=_APPLY,
        content=msgspec.json.encode(scale),
    )
    if reply.status_code == 409:
        return False
    if reply.status_code != 200:
        raise ScaleAway(answer_of(reply, f"{owner}/scale"))
    return True


async def run(client: httpx.AsyncClient, words: Sequence[str]) -> None:
    """Runs the program with its arguments. Raises the errors of `keep_sizes`."""
    await keep_sizes(client, read_objects(words))


def run_job(run: Callable[[httpx.AsyncClient, Sequence[str]], Awaitable[None]]) -> int:
    """Runs a Job's program against the API server of its pod; returns the exit status.

    1 stops the upgrade, and a retry may help; LATE (3) means that a retry does not help.
    """

    async def with_client() -> None:
        async with open_client(Path(SERVICE_ACCOUNT)) as client:
            await run(client, sys.argv[1:])

    try:
        asyncio.run(with_client())
    except TandemError as error:
        log.error("the upgrade fails: %s", error.message)
        return LATE if isinstance(error, DeadlineExceeded) else 1
    except httpx.HTTPError as error:
        log.error("the upgrade fails: the Kubernetes API server cannot be reached: %r", error)
        return 1
    return 0


def main() -> int:
    """Runs the program; returns the exit status. 1 stops the upgrade before it changes anything."""
    from tandem.net.observability.logs import configure_logging

    configure_logging("keep-sizes")
    return run_job(run)


if __name__ == "__main__":
    sys.exit(main())
