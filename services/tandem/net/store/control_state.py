"""The state of the pool controller and of Ray's head in Redis, so that routers can read it without
Ray.

{tandem:CLUSTER}:controller  STRING, JSON of `ControllerBeat`, written every `BEAT_INTERVAL_S`
{tandem:CLUSTER}:head        STRING, JSON of `Head`. On one machine, `tandem up` writes the value
                             whenever it changes. On several machines, the value is the lease of
                             Ray's head.
"""

import msgspec

BEAT_INTERVAL_S = 2.0
CONTROLLER_KEY = "controller"
HEAD_KEY = "head"


class ControllerBeat(msgspec.Struct, frozen=True):
    """The heartbeat of a pool controller. `num_beats` grows with each heartbeat."""

    pid: int
    num_beats: int
    # Fencing number of the Ray head that the controller uses. Each new head has a higher number. On
    # a single machine, the number is 0.
    number: int = 0


class Head(msgspec.Struct, frozen=True):
    """Ray's head. `address` is the address of Ray's control service (GCS) on the head. The field is
    empty until the GCS has started."""

    # Fencing number of the head. Each new head has a higher number. On a single machine, where
    # Ray's head has no lease, the number is 0.
    number: int
    host: str
    address: str = ""
    why: str = ""  # reason why the head was last changed


def control_key(cluster_id: str, name: str) -> str:
    return f"{{tandem:{cluster_id}}}:{name}"
