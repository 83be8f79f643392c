"""Heartbeats of Ray's part of a cluster in Redis. Routers read them and do not need Ray.

{tandem:CLUSTER}:controller  STRING, JSON of `ControllerBeat`, written every `BEAT_INTERVAL_S`
{tandem:CLUSTER}:head        STRING, JSON of `Head`: on one machine written by `tandem up`
                             whenever it changes, on several the lease of the head
"""

import msgspec

BEAT_INTERVAL_S = 2.0
CONTROLLER_KEY = "controller"
HEAD_KEY = "head"


class ControllerBeat(msgspec.Struct, frozen=True):
    """The heartbeat of a pool controller. `num_beats` grows with each one."""

    pid: int
    num_beats: int
    number: int = 0  # number of its head; 0 on a single machine


class Head(msgspec.Struct, frozen=True):
    """Ray's head. `address` is that of its GCS; empty until it is up."""

    number: int  # fencing number; 0 on a single machine, whose head has no lease
    host: str
    address: str = ""
    why: str = ""  # reason why the head has changed


def control_key(cluster_id: str, name: str) -> str:
    return f"{{tandem:{cluster_id}}}:{name}"
