"""The gRPC service of a worker (proto/tandem/v1/worker.proto). It calls the worker's components."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, get_args

import grpc
import msgspec

from tandem.common.adapter import Adapter
from tandem.common.config.cluster import Role
from tandem.errors import ConfigError
from tandem.net.rpc.convert import retention_of, to_message, to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer
from tandem.net.store.registry import KvCompatibility
from tandem.prefix_index.entries import ENTRY_BYTES, NUM_BUCKETS, bucket_start
from tandem.transfer.nixl.reach import host_identity
from tandem.transfer.reads.messages import ProducerReady
from tandem.worker.lifecycle.worker import Worker
from tandem.worker.lifecycle.worker_log import read_log

log = logging.getLogger(__name__)


class Servicer(WorkerServicer):
    """Converts gRPC messages and calls the components of the worker. Has no state of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Decode(
        self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Any
    ) -> AsyncIterator[pb.DecodeUpdate]:
        async for update in self._worker.decode.serve(request_iterator, self._worker.load()):
            yield update

    async def Prefill(
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        async for event in self._worker.prefill.serve(request_iterator, context):
            yield event

    async def FetchBlocks(
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[bytes]:
        async for message in self._worker.prefill.blocks.fetch(request, context):
            yield message

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> AsyncIterator[bytes]:
        async for message in self._worker.prefill.blocks.probe(request, context):
            yield message

    async def ListChains(
        self, request: pb.ListChainsRequest, context: Any
    ) -> pb.ListChainsResponse:
        chains = await self._worker.link.list_prefixes(request.blocks_max)
        return pb.ListChainsResponse(chains=[pb.BlockChain(block_hashes=chain) for chain in chains])

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: Any
    ) -> pb.ListBlocksResponse:
        first = max(0, request.first_bucket)
        end = request.end_bucket
        if not first < end <= NUM_BUCKETS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"buckets are {first} to {end}; they must be a range within 0 to {NUM_BUCKETS}",
            )
        if request.tier and request.tier not in (tiers := self._worker.config.engine.tiers):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"tier is {request.tier!r}, but this worker's tiers are "
                f"{', '.join(tiers) or 'none'}",
            )
        hashes = await self._worker.link.list_blocks(
            bucket_start(first), bucket_start(end), request.tier
        )
        return pb.ListBlocksResponse(hashes=b"".join(h[:ENTRY_BYTES] for h in hashes))

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.ResetPrefixCacheResponse:
        num_blocks = await self._worker.link.reset_prefix_cache()
        return pb.ResetPrefixCacheResponse(num_blocks=num_blocks)

    async def ReadLog(self, request: pb.ReadLogRequest, context: Any) -> pb.ReadLogResponse:
        return await read_log(request, context)

    async def Keep(self, request: pb.KeepRequest, context: Any) -> pb.KeepResponse:
        hashes = list(request.block_hashes)
        retention = retention_of(request)
        kept = await self._worker.link.keep_chain(request.cache_salt, retention, hashes)
        return to_message(pb.KeepResponse, kept)

    async def DescribeAdapter(
        self, request: pb.DescribeAdapterRequest, context: Any
    ) -> pb.DescribeAdapterResponse:
        try:
            digest, rank = await self._worker.adapters.describe(request.path)
        except ConfigError as error:
            return pb.DescribeAdapterResponse(error=error.message)
        return pb.DescribeAdapterResponse(digest=digest, rank=rank)

    async def AddAdapter(
        self, request: pb.AddAdapterRequest, context: Any
    ) -> pb.AddAdapterResponse:
        self._worker.adapters.add(to_struct(Adapter, request.adapter))
        await self._worker.tell_record()
        return pb.AddAdapterResponse()

    async def RemoveAdapter(
        self, request: pb.RemoveAdapterRequest, context: Any
    ) -> pb.RemoveAdapterResponse:
        self._worker.adapters.remove(request.name)
        await self._worker.tell_record()
        return pb.RemoveAdapterResponse()

    async def Connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectResponse:
        compatibility = self._worker.compatibility
        theirs = to_struct(KvCompatibility, request.compatibility)
        if differences := compatibility.differences(theirs):
            own_id = self._worker.config.worker_id
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{request.worker_id} cannot read KV blocks of {own_id}: on {own_id}, "
                + "; ".join(differences),
            )
        transfer = self._worker.config.transfer
        response = pb.ConnectResponse(
            worker_id=self._worker.config.worker_id,
            epoch=self._worker.epoch,
            compatibility=to_message(pb.KvCompatibility, compatibility),
            transports=["grpc"],
            host=to_message(pb.HostIdentity, host_identity(transfer.nixl_tcp)),
        )
        if transfer.transport != "grpc" and list(request.transports) != ["grpc"]:
            producer = await self._worker.link.describe_producer()
            self._offer(response, producer.ranks, request.transports)
        if transfer.transport in ("nixl", "cuda_ipc"):
            response.transports.remove("grpc")
        return response

    def _offer(
        self,
        response: pb.ConnectResponse,
        ranks: Sequence[ProducerReady],
        transports: Collection[str],
    ) -> None:
        """Adds how a peer that can use `transports` can read the pools of these ranks."""
        others = [response.other_ranks.add() for _ in ranks[1:]]
        rows: list[pb.ConnectResponse | pb.RankPool] = [response, *others]
        for row, rank in zip(rows, ranks, strict=True):
            row.pool = msgspec.msgpack.encode(rank.pool)
            for name, error in (("NIXL", rank.error), ("CUDA IPC", rank.cuda_ipc_error)):
                if error:
                    log.warning("this worker cannot serve blocks over %s: %s", name, error)
        if "nixl" in transports and all(rank.metadata for rank in ranks):
            response.transports.insert(0, "nixl")
            for row, rank in zip(rows, ranks, strict=True):
                row.nixl_metadata = rank.metadata
        if "cuda_ipc" in transports and all(rank.cuda_ipc for rank in ranks):
            response.transports.insert(0, "cuda_ipc")
            for row, rank in zip(rows, ranks, strict=True):
                row.cuda_ipc_metadata = rank.cuda_ipc

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self._worker.stop(request.deadline_s or self._worker.config.drain_deadline_s)
        return pb.DrainResponse()

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        wanted: dict[str, Role] = {role: role for role in get_args(Role)}
        if request.role not in wanted:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"role is {request.role!r}; it must be one of {', '.join(wanted)}",
            )
        if self._worker.state != "ready":
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker is {self._worker.state}; only a ready worker can change its role",
            )
        took_s = await self._worker.role.to(wanted[request.role])
        return pb.SetRoleResponse(role=request.role, took_s=took_s)

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        message = await self._worker.link.check_integrity()
        pairs = self._worker.rates.pairs
        return pb.GetStateResponse(
            load=to_message(pb.WorkerLoad, self._worker.load()),
            worker_id=self._worker.config.worker_id,
            epoch=self._worker.epoch,
            draining=self._worker.state == "draining",
            integrity_ok=not message,
            integrity_message=message,
            transports={peer: rate.transport for peer, rate in pairs.items()},
            rates={peer: to_message(pb.PairRate, rate) for peer, rate in pairs.items()},
        )
