"""Reads and sets the sizes of pools whose pods belong to a Kubernetes object such as a StatefulSet.

The size of a pool is read and set through the object's `scale` subresource.

    GET   /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale
    PATCH /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale
    {"spec": {"replicas": 2}}    body of the PATCH: a merge patch, as `kubectl scale` sends it
This module waits for no pod and knows no workers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from pathlib import Path

import httpx2
from lightkube import AsyncClient
from lightkube.models.autoscaling_v1 import Scale, ScaleSpec, ScaleStatus
from lightkube.types import PatchType

from tandem.errors import DeadlineExceeded, NotNow, ScaleAway, ScaleRefused, TandemError
from tandem.router.scaling.kubernetes.client import (
    DEADLINE_S,
    UNREADABLE,
    answer_of,
    open_client,
    resource_and_name,
)

log = logging.getLogger(__name__)

_MANAGER = "tandem-router"  # field manager that owns `replicas` after a router has set the size


class KubernetesScale:
    def __init__(self, objects: Mapping[str, str], account: Path) -> None:
        """`objects` maps a pool to RESOURCE/NAME. `account` is the service account's folder."""
        self._objects = objects
        self._account = account

    async def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Sets all sizes at the API server.

        If this router may not set one of the sizes, NotNow is raised and no size is set. If some
        requests fail, the first error is raised, and its message has the result for each size.
        """
        if foreign := [pool for pool in sizes if pool not in self._objects]:
            raise NotNow(
                f"this router cannot set the size of {' and '.join(foreign)}, because an HPA, "
                "KEDA or a RayCluster sets this size. This router can set: "
                f"{', '.join(self._objects)}",
                param=foreign[0],
            )
        async with open_client(AsyncClient, self._account) as client:
            results = await asyncio.gather(
                *(self._set(client, pool, n) for pool, n in sizes.items()), return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TandemError):
                raise result
        if errors := [result for result in results if isinstance(result, TandemError)]:
            outcomes = zip(sizes, results, strict=True)
            taken = [
                f"the size of {pool} was set to {sizes[pool]}"
                for pool, error in outcomes
                if error is None
            ]
            raise type(errors[0])("; ".join([*(e.message for e in errors), *taken]))

    async def sizes(self) -> dict[str, int]:
        """Returns the requested replicas of each worker pool. Raises the errors of `set_sizes`."""
        scales = await self._scales([pool for pool in self._objects if pool != "router"])
        return {pool: _replicas(scale.spec) for pool, scale in scales.items()}

    async def pools(self) -> dict[str, dict[str, int]]:
        """Returns the requested and running pods of each pool. Raises the errors of `set_sizes`."""
        scales = await self._scales(list(self._objects))
        return {
            pool: {"wanted": _replicas(scale.spec), "running": _replicas(scale.status)}
            for pool, scale in scales.items()
        }

    async def _scales(self, pools: list[str]) -> dict[str, Scale]:
        async with open_client(AsyncClient, self._account) as client:
            scales = await asyncio.gather(*(self._read(client, pool) for pool in pools))
            return dict(zip(pools, scales, strict=True))

    async def _read(self, client: AsyncClient, pool: str) -> Scale:
        resource, name = resource_and_name(self._objects[pool])
        return await self._answer(client.get(resource.Scale, name), pool, "read")

    async def _set(self, client: AsyncClient, pool: str, size: int) -> None:
        resource, name = resource_and_name(self._objects[pool])
        patch = {"spec": {"replicas": size}}
        call = client.patch(
            resource.Scale, name, patch, patch_type=PatchType.MERGE, field_manager=_MANAGER
        )
        await self._answer(call, pool, "set")
        log.debug(
            "the size of the %s pool was set to %d replicas of %s", pool, size, self._objects[pool]
        )

    async def _answer(self, call: Awaitable[object], pool: str, done: str) -> Scale:
        owner = self._objects[pool]
        try:
            async with asyncio.timeout(DEADLINE_S):
                scale = await call
        except (TimeoutError, httpx2.TimeoutException) as error:
            outcome = (
                "could not be read"
                if done == "read"
                else "may be the old or the new one; `tandem status` shows it"
            )
            raise DeadlineExceeded(
                f"the Kubernetes API server did not answer in {DEADLINE_S:g} s, so the size of "
                f"{pool} {outcome}"
            ) from error
        except httpx2.HTTPStatusError as error:
            raise _refusal(error, pool, owner, done) from error
        except httpx2.HTTPError as error:
            raise ScaleAway(
                f"the size of {pool} was not {done}: the Kubernetes API server cannot be reached: "
                f"{error}"
            ) from error
        except UNREADABLE as error:
            raise ScaleAway(
                f"the Kubernetes API server's answer for {owner} is not a Scale object: {error}"
            ) from error
        assert isinstance(scale, Scale)
        return scale


def _replicas(part: ScaleSpec | ScaleStatus | None) -> int:
    """Returns the number of replicas, or 0 if the API server left out the number."""
    return (part and part.replicas) or 0


def _refusal(error: httpx2.HTTPStatusError, pool: str, owner: str, done: str) -> TandemError:
    """Converts the API server's error to a TandemError, whose class says if a retry may help."""
    status = error.response.status_code
    message = f"the size of {pool} was not {done}: {answer_of(error, owner)}"
    if status in (401, 403):
        return ScaleRefused(
            f"{message} (the router's service account needs the right to patch the scale of "
            f"{owner})"
        )
    if status == 429 or status >= 500:
        return ScaleAway(message)
    return NotNow(message)
