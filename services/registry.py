"""Worker records in Redis: who is alive, where, in which state, and under which contract.

Keys (`{tandem:CLUSTER}` is one hash tag, so that all of a cluster's control keys share a slot):

    {tandem:CLUSTER}:workers              SET of worker ids that registered and did not leave
    {tandem:CLUSTER}:worker:ID            msgpack WorkerRecord, with a time to live
    {tandem:CLUSTER}:contract             msgpack Contract of the cluster, kept alive by workers

A record is written every `record_interval_s` by its worker and expires after `record_ttl_s`: then
the worker is dead to everybody. The first worker sets the cluster's contract; one that differs is
refused with a message that names each difference.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from redis.asyncio import Redis

from services.config import ClusterConfig
from services.errors import Incompatible

State = Literal["starting", "ready", "draining"]
PROTOCOL_VERSION = 1


class Contract(msgspec.Struct, frozen=True):
    """What must be equal for two workers to exchange KV; only tensor_parallel may differ."""

    model_fingerprint: str
    compute_dtype: str
    numerics: str
    block_size: int
    kv_dtype: str
    layout: str
    hash_version: int
    protocol_version: int = PROTOCOL_VERSION
    tensor_parallel: int = 1

    def differences(self, other: Contract) -> list[str]:
        """One phrase for each field that differs and may not; empty when the two can be paired."""
        return [
            f"{name} is {getattr(self, name)!r}, not {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if name != "tensor_parallel" and getattr(self, name) != getattr(other, name)
        ]


class Load(msgspec.Struct, frozen=True):
    """A worker's load when it wrote its record."""

    num_running: int = 0
    num_waiting: int = 0
    queue_max: int = 0
    queued_tokens: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_quarantined: int = 0
    num_leases: int = 0
    num_pulls: int = 0
    step: int = 0


class WorkerRecord(msgspec.Struct, frozen=True):
    worker_id: str
    epoch: str  # new at each start of the process and each time its log is published again
    role: str  # "prefill" or "decode": the pool it is in
    state: State
    address: str  # host:port of its gRPC service
    metrics_address: str
    host: str  # machine it runs on
    pid: int
    model: str  # served name
    max_model_len: int
    contract: Contract
    load: Load = Load()
    transports: dict[str, str] = {}  # peer worker id -> nixl or grpc
    started_at: float = 0.0  # seconds since the Unix epoch


class Registry:
    """Reads and writes the records of one cluster. Errors of redis-py pass through."""

    def __init__(self, redis: Redis, cluster: ClusterConfig) -> None:
        self._redis = redis
        self._prefix = f"{{tandem:{cluster.cluster_id}}}"
        self._ttl_ms = round(cluster.record_ttl_s * 1000)

    async def check_contract(self, contract: Contract) -> None:
        """Joins the cluster's contract, or makes it. Raises Incompatible naming the differences."""
        key = f"{self._prefix}:contract"
        mine = msgspec.msgpack.encode(contract)
        await self._redis.set(key, mine, nx=True, px=self._ttl_ms)
        found = await self._redis.get(key)
        if found is None:
            return
        cluster = msgspec.msgpack.decode(found, type=Contract)
        if differences := contract.differences(cluster):
            raise Incompatible(
                "this worker cannot join the cluster: its " + "; its ".join(differences)
            )

    async def write(self, record: WorkerRecord) -> None:
        """Keeps a worker (and the cluster's contract) alive for another time to live."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(
                f"{self._prefix}:worker:{record.worker_id}",
                msgspec.msgpack.encode(record),
                px=self._ttl_ms,
            )
            pipe.sadd(f"{self._prefix}:workers", record.worker_id)
            pipe.set(f"{self._prefix}:contract", msgspec.msgpack.encode(record.contract), nx=True)
            pipe.pexpire(f"{self._prefix}:contract", self._ttl_ms)
            await pipe.execute()

    async def remove(self, worker_id: str) -> None:
        """Removes a worker that leaves in order."""
        await self._redis.srem(f"{self._prefix}:workers", worker_id)
        await self._redis.delete(f"{self._prefix}:worker:{worker_id}")

    async def read(self) -> list[WorkerRecord]:
        """Records of all workers alive, by worker id; ids whose record expired are dropped."""
        members = await self._redis.smembers(f"{self._prefix}:workers")
        worker_ids = sorted(m.decode() for m in members)
        if not worker_ids:
            return []
        values = await self._redis.mget([f"{self._prefix}:worker:{w}" for w in worker_ids])
        return [msgspec.msgpack.decode(v, type=WorkerRecord) for v in values if v is not None]
