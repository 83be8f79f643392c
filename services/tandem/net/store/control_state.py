"""Signs of life of Ray's part of a cluster, in Redis; routers read them and need no Ray.

{tandem:CLUSTER}:controller  STRING, JSON of `ControllerBeat`, written every `BEAT_INTERVAL_S`
{tandem:CLUSTER}:head        STRING, JSON of `Head`: on one machine written by `tandem up`
                             whenever it changes, on several the lease of the head
"""

import msgspec

BEAT_INTERVAL_S = 2.0
CONTROLLER_KEY = "controller"
HEAD_KEY = "head"


class ControllerBeat(msgspec.Struct, frozen=True):
    """A pool controller that lives writes a higher number each time."""

    pid: int
    num_beats: int
    number: int = 0  # of its head; 0 on a single machine


class Head(msgspec.Struct, frozen=True):
    """Ray's head. Its `address` is that of its GCS, and empty until it is up."""

    number: int  # its fencing number; 0 on a single machine, whose head has no lease
    host: str
    address: str = ""
    why: str = ""  # there is another head than before


def control_key(cluster_id: str, name: str) -> str:
    return f"{{tandem:{cluster_id}}}:{name}"
