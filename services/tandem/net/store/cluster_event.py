"""An event of the cluster, as routers write it to the stream of events (router/workers/events.py)
and other programs read it."""

import msgspec


class ClusterEvent(msgspec.Struct, frozen=True):
    """An event in the cluster. `about` is a worker's id, an error's code, or empty."""

    at: float  # seconds since the epoch
    kind: str
    about: str
    text: str


def events_key(cluster_id: str) -> str:
    """Returns the key of the stream with the events."""
    return f"{{tandem:{cluster_id}}}:events:all"
