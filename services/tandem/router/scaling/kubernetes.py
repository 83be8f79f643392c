"""Reads and sets pool sizes that Kubernetes owns, by the scale of the object of a pool's pods.

    GET   /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale
    PATCH /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale
    {"spec": {"replicas": 2}}    a merge patch of an autoscaling/v1 Scale, as `kubectl scale` sends
The pod's service account is a folder (token, ca.crt, namespace). kubelet rewrites its files before
they expire, so each request reads them. This module waits for no pod and knows no workers.
https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.errors import DeadlineExceeded, NotNow, ScaleAway, ScaleRefused, TandemError

log = logging.getLogger(__name__)

DEADLINE_S = 3.0  # shorter than the time that `tandem scale` waits for its answer
_MESSAGE_MAX = 500  # characters of the API server's reason
_HEADERS = {"Content-Type": "application/merge-patch+json", "Accept": "application/json"}
_MANAGER = {"fieldManager": "tandem-router"}  # owner of `replicas` in the object's managedFields


class _ScaleSpec(msgspec.Struct):
    replicas: int = 0  # the server omits a zero


class _Scale(msgspec.Struct):
    """The fields of autoscaling/v1 Scale that are used."""

    spec: _ScaleSpec = msgspec.field(default_factory=_ScaleSpec)
    status: _ScaleSpec = msgspec.field(default_factory=_ScaleSpec)


class KubernetesScale:
    def __init__(self, objects: Mapping[str, str], account: Path) -> None:
        """`objects` maps a pool to RESOURCE/NAME. `account` is the service account's folder."""
        self._objects = objects
        self._account = account

    async def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Sets all sizes at the API server.

        Raises NotNow before the first request if this router may not set one of them. Otherwise
        raises the first error; its message has the result of each size.
        """
        if foreign := [pool for pool in sizes if pool not in self._objects]:
            raise NotNow(
                f"the size of {' and '.join(foreign)} is not this router's to set (that of "
                f"{', '.join(self._objects)} is): its HPA, KEDA or RayCluster owns it",
                param=foreign[0],
            )
        async with open_client(self._account) as client:
            results = await asyncio.gather(
                *(self._patch(client, pool, n) for pool, n in sizes.items()), return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TandemError):
                raise result
        if errors := [result for result in results if isinstance(result, TandemError)]:
            outcomes = zip(sizes, results, strict=True)
            taken = [f"{pool} is set to {sizes[pool]}" for pool, error in outcomes if error is None]
            raise type(errors[0])("; ".join([*(e.message for e in errors), *taken]))

    async def sizes(self) -> dict[str, int]:
        """Returns the requested replicas of each pool of workers. Raises the errors of
        `set_sizes`.
        """
        scales = await self._scales([pool for pool in self._objects if pool != "router"])
        return {pool: scale.spec.replicas for pool, scale in scales.items()}

    async def pools(self) -> dict[str, dict[str, int]]:
        """Returns the requested and running pods of each pool. Raises the errors of `set_sizes`."""
        scales = await self._scales(list(self._objects))
        return {
            pool: {"wanted": scale.spec.replicas, "running": scale.status.replicas}
            for pool, scale in scales.items()
        }

    async def _scales(self, pools: list[str]) -> dict[str, _Scale]:
        async with open_client(self._account) as client:
            calls = (self._call(client, "GET", pool, "read") for pool in pools)
            return dict(zip(pools, await asyncio.gather(*calls), strict=True))

    async def _patch(self, client: httpx.AsyncClient, pool: str, size: int) -> None:
        patch = msgspec.json.encode({"spec": {"replicas": size}})
        await self._call(client, "PATCH", pool, "set", params=_MANAGER, content=patch)
        log.debug("%s: %d replicas are wanted of %s", pool, size, self._objects[pool])

    async def _call(
        self, client: httpx.AsyncClient, method: str, pool: str, done: str, **more: Any
    ) -> _Scale:
        owner = self._objects[pool]
        try:
            async with asyncio.timeout(DEADLINE_S):
                reply = await client.request(method, f"{owner}/scale", **more)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise DeadlineExceeded(
                f"{pool} may be {done} or not: the Kubernetes API server did not answer in "
                f"{DEADLINE_S:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise ScaleAway(
                f"{pool} is not {done}: the Kubernetes API server cannot be reached: {error}"
            ) from error
        if reply.status_code != 200:
            raise _refusal(reply, pool, owner, done)
        try:
            return msgspec.json.decode(reply.content, type=_Scale)
        except msgspec.DecodeError as error:
            raise ScaleAway(f"{owner}: the API server's answer is no Scale: {error}") from error


def open_client(account: Path) -> httpx.AsyncClient:
    """Opens a client of the API server for the pod's namespace and the API group apps.

    `account` is the service account's folder. Raises NotNow outside a pod, or if the pod has no
    token.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise NotNow(
            "sizes are set by Kubernetes, and KUBERNETES_SERVICE_HOST is not set: this router is "
            "in no pod"
        )
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token, namespace = (
            (account / name).read_text(encoding="utf-8").strip() for name in ("token", "namespace")
        )
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise NotNow(
            f"this router's pod has no service account that could set sizes: {error}"
        ) from error
    bracketed = f"[{host}]" if ":" in host else host
    return httpx.AsyncClient(
        base_url=f"https://{bracketed}:{port}/apis/apps/v1/namespaces/{namespace}",
        verify=tls,
        headers={**_HEADERS, "Authorization": f"Bearer {token}"},
        timeout=DEADLINE_S,
        trust_env=False,  # no proxy may get the token
    )


def answer_of(reply: httpx.Response, owner: str) -> str:
    """Returns the API server's answer for an object as text, with its reason."""
    message = f"the Kubernetes API server answers {reply.status_code} for {owner}"
    with suppress(msgspec.DecodeError):  # only a Status object has a reason
        answer = msgspec.json.decode(reply.content, type=dict[str, object])
        if reason := str(answer.get("message", ""))[:_MESSAGE_MAX]:
            message += f": {reason}"
    return message


def _refusal(reply: httpx.Response, pool: str, owner: str, done: str) -> TandemError:
    """Returns the API server's message as the error that says whether a retry may help."""
    status = reply.status_code
    message = f"{pool} is not {done}: {answer_of(reply, owner)}"
    if status in (401, 403):
        return ScaleRefused(f"{message} (the router's service account needs to patch its scale)")
    if status == 429 or status >= 500:
        return ScaleAway(message)
    return NotNow(message)
