"""A connected producer: another worker, as one process of it."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from tandem.net.rpc.channels import close_soon
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.transfer.protocol import Transport


@dataclass(slots=True)
class Peer:
    """A connected peer. Its `transport` may change: a pull looks at it when it starts."""

    worker_id: str
    epoch: str
    stub: WorkerStub
    channel: grpc.aio.Channel
    transports: Mapping[str, Transport]  # by name: all that there are
    transport: str = ""  # the name of the one in use
    offers_grpc: bool = True
    reason: str = ""  # why not NIXL, as logged last: it is not repeated

    @property
    def peer_id(self) -> str:
        return peer_id(self.worker_id, self.epoch)

    @property
    def in_use(self) -> Transport:
        return self.transports[self.transport]

    def close(self) -> None:
        """Ends what is under way; the channel closes soon."""
        for transport in self.transports.values():
            transport.close()
        close_soon(self.channel)


def peer_id(worker_id: str, epoch: str) -> str:
    """Names a process: a restarted worker is another peer."""
    return f"{worker_id}-{epoch}"
