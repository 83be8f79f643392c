"""Keeps the sizes of pools over an upgrade of the chart. A Job runs this before the upgrade.

    python -m tandem.router.scaling.keep_sizes statefulsets/NAME=2 deployments/NAME=3

Each word is RESOURCE/NAME of an object, and after `=` the chart's value of `replicas`. Without a
value, something other than the chart owns the size.

In server-side apply, a size falls back to 1 when the only manager that owns the field stops stating
it, and a manager that applies a different size gets a conflict. This program applies the scale of
each object as the manager `tandem-size`, so that the chart need not state a size.

https://kubernetes.io/docs/reference/using-api/server-side-apply/#transferring-ownership
"""

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.config.router import SERVICE_ACCOUNT
from tandem.errors import ScaleAway, TandemError
from tandem.router.scaling.kubernetes import answer_of, open_client

log = logging.getLogger(__name__)

MANAGER = "tandem-size"
TOLD = "tandem.dev/replicas"  # annotation: the value of `replicas` that the chart stated last
_APPLY = {"Content-Type": "application/apply-patch+yaml"}  # JSON is YAML, too
_ATTEMPTS = 10  # an object whose pods start changes often


def kept_size(live: Mapping[str, Any], replicas: int | None) -> int:
    """Returns the size of an object after the upgrade: the present one, unless the chart's value
    `replicas` has changed. An object of a chart that did not note the value keeps a size that
    somebody has set by its scale. The chart's template `tandem.replicas` has the same rule."""
    current = int(live["spec"]["replicas"])
    told = live["metadata"].get("annotations", {}).get(TOLD)
    if replicas is None or told == str(replicas):
        return current
    return current if told is None and _is_scaled(live) else replicas


def _is_scaled(live: Mapping[str, Any]) -> bool:
    return any(
        entry.get("subresource") == "scale"
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in live["metadata"].get("managedFields", [])
    )


def read_objects(words: Sequence[str]) -> dict[str, int | None]:
    """Returns the chart's value of each RESOURCE/NAME. Raises ValueError if one is no number."""
    pairs = (word.partition("=") for word in words)
    return {owner: int(value) if value else None for owner, _, value in pairs}


async def keep_sizes(client: httpx.AsyncClient, objects: Mapping[str, int | None]) -> None:
    """Takes the sizes of these objects over. An object that is not there yet is left out. Raises
    ScaleAway, or httpx.HTTPError if the API server cannot be reached."""
    for owner, replicas in objects.items():
        for _ in range(_ATTEMPTS):
            if await _take_over(client, owner, replicas):
                break
        else:
            raise ScaleAway(f"{owner} changed while its size was read, {_ATTEMPTS} times")


async def _take_over(client: httpx.AsyncClient, owner: str, replicas: int | None) -> bool:
    """Returns False if the object has changed meanwhile."""
    reply = await client.get(owner)
    if reply.status_code == 404:
        log.info("%s: not there yet", owner)
        return True
    if reply.status_code != 200:
        raise ScaleAway(answer_of(reply, owner))
    live = msgspec.json.decode(reply.content, type=dict[str, Any])
    size = kept_size(live, replicas)
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
        params={"fieldManager": MANAGER, "force": "true"},
        headers=_APPLY,
        content=msgspec.json.encode(scale),
    )
    if reply.status_code == 409:
        return False
    if reply.status_code != 200:
        raise ScaleAway(answer_of(reply, f"{owner}/scale"))
    log.info("%s: %d replicas", owner, size)
    return True


async def _run(objects: Mapping[str, int | None]) -> None:
    async with open_client(Path(SERVICE_ACCOUNT)) as client:
        await keep_sizes(client, objects)


def main() -> int:
    """Returns the exit status; 1 stops the upgrade before it changes anything."""
    from tandem.observability.logs import configure_logging

    configure_logging("keep-sizes")
    try:
        asyncio.run(_run(read_objects(sys.argv[1:])))
    except TandemError as error:
        log.error("the upgrade stops: %s", error.message)
        return 1
    except httpx.HTTPError as error:
        log.error("the upgrade stops: the Kubernetes API server cannot be reached: %r", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
