"""Lets an upgrade of the chart change the pools of a RayCluster that Ray's autoscaler has scaled.

The API server treats all worker groups of a RayCluster as one field. Ray's autoscaler patches the
number of replicas of one group and then owns the whole field, so a manager that applies other
groups gets a conflict. This program takes the field from every manager that has patched it. The
chart states the present numbers, and the autoscaler continues from them.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import httpx
import msgspec

from tandem.errors import ScaleAway
from tandem.router.scaling.kubernetes import answer_of

log = logging.getLogger(__name__)

RAY_CLUSTERS = "rayclusters/"
_GROUPS = "f:workerGroupSpecs"
_MERGE = {"Content-Type": "application/merge-patch+json"}
_ATTEMPTS = 10


def without_patches(managers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a RayCluster's `managedFields` without the worker groups of managers that patched
    them.

    Managers that apply the groups keep them.
    """
    kept = []
    for entry in deepcopy([dict(entry) for entry in managers]):
        spec = entry.get("fieldsV1", {}).get("f:spec", {})
        if entry.get("operation") == "Update" and _GROUPS in spec:
            del spec[_GROUPS]
            if not spec:
                del entry["fieldsV1"]["f:spec"]
            if not entry["fieldsV1"]:
                continue
        kept.append(entry)
    return kept


async def free_groups(client: httpx.AsyncClient, owner: str) -> None:
    """Takes the worker groups of `owner` (rayclusters/NAME) from managers that patched them.

    Raises ScaleAway, or httpx.HTTPError if the API server cannot be reached.
    """
    base = client.base_url
    url = base.copy_with(path=base.path.replace("/apps/v1/", "/ray.io/v1/", 1) + owner)
    for _ in range(_ATTEMPTS):
        reply = await client.get(url)
        if reply.status_code == 404:
            log.info("%s: not there yet", owner)
            return
        if reply.status_code != 200:
            raise ScaleAway(answer_of(reply, owner))
        metadata = msgspec.json.decode(reply.content, type=dict[str, Any])["metadata"]
        managers = metadata.get("managedFields", [])
        if (kept := without_patches(managers)) == managers:
            return
        version = metadata["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, "managedFields": kept}}
        reply = await client.patch(url, headers=_MERGE, content=msgspec.json.encode(body))
        if reply.status_code == 200:
            log.info("%s: the upgrade may change its worker groups", owner)
            return
        if reply.status_code != 409:
            raise ScaleAway(answer_of(reply, owner))
    raise ScaleAway(f"{owner} changed while it was read, {_ATTEMPTS} times")
