"""Defines the events that routers write to the cluster's event stream in Redis
(router/workers/events.py) and that other programs read there."""

import msgspec


class ClusterEvent(msgspec.Struct, frozen=True):
    """An event in the cluster. `about` is a worker's id, an error's code, or empty."""

    at: float  # seconds since the epoch
    kind: str
    about: str
    text: str


def events_key(cluster_id: str) -> str:
    """Returns the Redis key of the event stream."""
    return f"{{tandem:{cluster_id}}}:events:all"
