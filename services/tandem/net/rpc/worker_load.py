"""Converts a worker's load to and from its message in worker.proto, field by field by name.

A new field of `WorkerLoad` needs only a field of the same name in the message.
"""

from msgspec.structs import asdict

from tandem.common.worker_load import GroupLoad, WorkerLoad
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

_GROUP_FIELDS = GroupLoad.__struct_fields__
# queued_s is absent in messages of older workers and while no rate was measured
_SAME = tuple(n for n in WorkerLoad.__struct_fields__ if n not in ("queued_s", "groups"))


def load_message(load: WorkerLoad) -> pb.WorkerLoad:
    groups = [pb.KvGroupLoad(**asdict(group)) for group in load.groups]
    return pb.WorkerLoad(**{**asdict(load), "groups": groups})


def load_of(message: pb.WorkerLoad) -> WorkerLoad:
    groups = [GroupLoad(*[getattr(g, name) for name in _GROUP_FIELDS]) for g in message.groups]
    return WorkerLoad(
        **{name: getattr(message, name) for name in _SAME},
        queued_s=message.queued_s if message.HasField("queued_s") else None,
        groups=tuple(groups),
    )
