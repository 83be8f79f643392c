"""A connected source: another worker, as one process of it."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from tandem.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.worker.peers.bulk_channels import BulkChannels


@dataclass(slots=True)
class Peer:
    """`transport` may change while it is connected: a pull looks at it when it starts."""

    worker_id: str
    epoch: str
    stub: WorkerStub
    channel: grpc.aio.Channel
    bulk: BulkChannels
    transport: str = ""  # "nixl" or "grpc"
    offers_grpc: bool = True
    reason: str = ""  # why not NIXL, as logged last: it is not repeated

    @property
    def peer_id(self) -> str:
        return peer_id(self.worker_id, self.epoch)


def peer_id(worker_id: str, epoch: str) -> str:
    """Names a process: a restarted worker is another peer."""
    return f"{worker_id}-{epoch}"
