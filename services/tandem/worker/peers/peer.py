"""A connected producer, identified by worker id and epoch."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from tandem.net.rpc.channels import close_soon
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.transfer.protocol import Transport


@dataclass(slots=True)
class Peer:
    """A connected peer. A change of `transport` does not affect pulls that have already begun."""

    worker_id: str
    epoch: str
    stub: WorkerStub
    channel: grpc.aio.Channel
    transports: Mapping[str, Transport]  # all transports by name
    transport: str = ""  # name of the transport in use
    offers_grpc: bool = True
    # Why a better transport is not used, for example "slow"; otherwise "". Logged when it changes.
    reason: str = ""

    @property
    def peer_id(self) -> str:
        return peer_id(self.worker_id, self.epoch)

    @property
    def in_use(self) -> Transport:
        return self.transports[self.transport]

    def close(self) -> None:
        """Ends all pulls; the channel closes soon after."""
        for transport in self.transports.values():
            transport.close()
        close_soon(self.channel)


def peer_id(worker_id: str, epoch: str) -> str:
    """Returns the id of a worker process. After a restart, a worker has another id."""
    return f"{worker_id}-{epoch}"
