"""Opens clients of the Kubernetes API server with the service account of this pod.

The service account is a folder with the files token, ca.crt and namespace. kubelet replaces the
token before it expires, so a client is opened for each use.
https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
"""

import os
from pathlib import Path
from typing import TypeVar

import httpx2
from lightkube import ApiError, AsyncClient, Client, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment, StatefulSet

from tandem.errors import NotNow

# Deadline in seconds of a call to the API server. `tandem scale`, which waits for the call, has a
# longer deadline.
DEADLINE_S = 3.0
UNREADABLE = (KeyError, ValueError)  # errors raised if the API server's answer cannot be parsed
_MESSAGE_MAX = 500  # the API server's reasons are cut to this many characters
_C = TypeVar("_C", Client, AsyncClient)

Resource = type[StatefulSet] | type[Deployment] | type[GenericNamespacedResource]
_RESOURCES: dict[str, Resource] = {
    "statefulsets": StatefulSet,
    "deployments": Deployment,
    "rayclusters": create_namespaced_resource("ray.io", "v1", "RayCluster", "rayclusters"),
}


def open_client(kind: type[_C], account: Path) -> _C:
    """Opens a client for the pod's namespace. `account` is the service account's folder.

    Raises NotNow outside a pod, or if the pod has no token.
    """
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        if not os.environ.get(name):
            raise NotNow(
                "pool sizes can be set only from a pod in Kubernetes. This process is not in "
                f"a pod: the variable {name} of Kubernetes is missing"
            )
    try:
        config = KubeConfig.from_service_account(account)
        # trust_env=False: do not use a proxy from the environment, which must not get the token.
        return kind(config, timeout=httpx2.Timeout(DEADLINE_S), trust_env=False)
    except (OSError, ConfigError) as error:
        raise NotNow(
            f"pool sizes cannot be set, because this pod has no usable service account: {error}"
        ) from error


def resource_and_name(owner: str) -> tuple[Resource, str]:
    """Splits `owner`, such as statefulsets/NAME, into the resource's class and the name."""
    resource, _, name = owner.partition("/")
    return _RESOURCES[resource], name


def answer_of(error: httpx2.HTTPStatusError, owner: str) -> str:
    """Returns a message with the API server's status and reason for its refusal."""
    message = f"the Kubernetes API server answered {error.response.status_code} for {owner}"
    reason = (error.status.message or "")[:_MESSAGE_MAX] if isinstance(error, ApiError) else ""
    return f"{message}: {reason}" if reason else message
