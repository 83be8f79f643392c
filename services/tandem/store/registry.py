"""Worker records in Redis: who is alive, where, in which state, and under which contract.

Keys (`{tandem:CLUSTER}` is one hash tag, so that all of a cluster's control keys share a slot):

    {tandem:CLUSTER}:workers              SET of worker ids that registered and did not leave
    {tandem:CLUSTER}:worker:ID            msgpack WorkerRecord, with a time to live
    {tandem:CLUSTER}:contract             msgpack Contract of the cluster, kept alive by workers
    {tandem:CLUSTER}:contract:GENERATION  that of a generation with a name
    {tandem:CLUSTER}:mark                 drawn by who first asked `data_set`; lost with the data

A record is written every `record_interval_s` by its worker and expires after `record_ttl_s`: then
the worker is dead to everybody. The first worker sets the cluster's contract; one that differs is
refused with a message that names each difference, and is not seen by readers if it writes a record
all the same. The contract goes with its last worker.

An upgrade to what cannot exchange KV with what runs is another *generation*: its workers agree on a
contract of their own, and both generations serve until the old one has drained. Who may be paired
is told by contracts, never by generations.
"""

from __future__ import annotations

import logging
import secrets
from typing import Literal

import msgspec

from tandem.block_hash import chain_root
from tandem.config import ClusterConfig
from tandem.cost_model import PairRate, WorkerRates
from tandem.errors import Incompatible
from tandem.store.client import Client
from tandem.store.script import Script

logger = logging.getLogger(__name__)

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

    def pairing_key(self) -> bytes:
        """Equal for two contracts that do not differ in what they may not."""
        return _shared(self)

    def chain_root(self, cache_salt: bytes = b"") -> bytes:
        """What the block hashes of a prompt start from."""
        return chain_root(
            model_fingerprint=self.model_fingerprint,
            compute_dtype=self.compute_dtype,
            numerics=self.numerics,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            cache_salt=cache_salt,
        )


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
    tokens_wasted: int = 0  # slots of blocks that live sequences hold and do not fill
    num_seats: int = 0  # sequences that may run or pull at once; 0: it does not say
    chunk_tokens: int = 0  # of prefill in a step, beside those who decode; 0: it does not say


class WorkerRecord(msgspec.Struct, frozen=True):
    worker_id: str
    epoch: str  # new at each start of the process and each time its log is published again
    role: str  # "prefill" or "decode": whose work it does now
    state: State
    address: str  # host:port of its gRPC service
    metrics_address: str
    host: str  # machine it runs on
    pid: int
    model: str  # served name
    max_model_len: int
    contract: Contract
    load: Load = Load()
    rates: WorkerRates = WorkerRates()
    pairs: dict[str, PairRate] = {}  # peer worker id -> how its blocks come here
    started_at: float = 0.0  # seconds since the Unix epoch
    generation: str = ""  # whose contract it agrees with
    pool: str = ""  # that it was started for and counts as: not `role` while it is lent
    memory_free_bytes: int = 0  # of its machine or container
    memory_total_bytes: int = 0  # 0: it does not say

    @property
    def transports(self) -> dict[str, str]:
        """Peer worker id -> nixl or grpc."""
        return {peer: rate.transport for peer, rate in self.pairs.items()}


# KEYS: 1 the record, 2 the set of workers, 3 the contract; all in one hash slot.
# ARGV: 1 worker id, 2 record, 3 contract, 4 time to live in ms.
# Returns nothing. Only a contract equal to the worker's is kept alive by it.
_WRITE = """
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
local contract = redis.call('GET', KEYS[3])
if not contract or contract == ARGV[3] then
  redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
end
"""

# KEYS: 1 the set of workers, 2 the contract, 3... records. ARGV: their worker ids, in order.
# Drops the ids that have no record now, and the contract with the last one. Returns nothing.
_DROP_DEAD = """
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then redis.call('SREM', KEYS[1], ARGV[i - 2]) end
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
"""

# KEYS: 1 the mark. ARGV: 1 what to make it when there is none.
# Returns {the server's run id, the mark}.
_DATA_SET = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
return {run_id or '', redis.call('GET', KEYS[1])}
"""


class Registry:
    """Reads and writes the records of one cluster. Errors of redis-py pass through."""

    def __init__(self, redis: Client, cluster: ClusterConfig) -> None:
        self._redis = redis
        prefix = f"{{tandem:{cluster.cluster_id}}}"
        self._workers_key = f"{prefix}:workers"
        self._contract_key = f"{prefix}:contract"
        self._record_prefix = f"{prefix}:worker:"
        self._ttl_ms = round(cluster.record_ttl_s * 1000)
        self._mark_key = f"{prefix}:mark"
        self._write, self._drop_dead = Script(_WRITE), Script(_DROP_DEAD)
        self._data_set = Script(_DATA_SET)
        self._left_out: set[str] = set()  # workers whose record `read` has complained about

    async def check_contract(self, contract: Contract, generation: str = "") -> None:
        """Joins the generation's contract, or makes it. Raises Incompatible naming differences."""
        key = self._contract_key_of(generation)
        await self._redis.set(key, _shared(contract), nx=True, px=self._ttl_ms)
        found = await self._redis.get(key)
        if found is not None and (differences := _differences(contract, _bytes(found))):
            raise Incompatible(
                "this worker cannot join the cluster: its " + "; its ".join(differences)
            )

    async def write(self, record: WorkerRecord) -> None:
        """Keeps a worker (and its generation's contract) alive for another time to live."""
        contract_key = self._contract_key_of(record.generation)
        await self._write(
            self._redis,
            [self._record_key(record.worker_id), self._workers_key, contract_key],
            record.worker_id,
            msgspec.msgpack.encode(record),
            _shared(record.contract),
            self._ttl_ms,
        )

    async def remove(self, worker_id: str) -> None:
        """Removes a worker that leaves in order; the last one takes the contract with it."""
        await self._redis.delete(self._record_key(worker_id))
        await self._drop([worker_id])

    async def read(self) -> list[WorkerRecord]:
        """Records of all workers alive, by worker id; ids whose record expired are dropped.

        A record that this version cannot read, or whose contract is not its generation's, is left
        out and logged once.
        """
        members = await self._redis.smembers(self._workers_key)
        worker_ids = sorted(_bytes(member).decode() for member in members)
        self._left_out.intersection_update(worker_ids)
        if not worker_ids:
            return []
        keys = [self._contract_key, *map(self._record_key, worker_ids)]
        replies = await self._redis.mget(keys)
        contract, *values = (None if reply is None else _bytes(reply) for reply in replies)
        found = dict(zip(worker_ids, values, strict=True))
        if dead := [worker_id for worker_id, value in found.items() if value is None]:
            await self._drop(dead)
        records = [
            record
            for worker_id, value in found.items()
            if value is not None and (record := self._decode(worker_id, value)) is not None
        ]
        contracts = await self._contracts({r.generation for r in records}, contract)
        return [r for r in records if self._agrees(r, contracts[r.generation])]

    async def _contracts(self, generations: set[str], unnamed: bytes | None) -> dict[str, bytes]:
        """Of these generations; empty where it has expired."""
        contracts = {"": unnamed or b""}
        if named := sorted(generations - {""}):
            replies = await self._redis.mget([self._contract_key_of(name) for name in named])
            values = (b"" if reply is None else _bytes(reply) for reply in replies)
            contracts.update(zip(named, values, strict=True))
        return contracts

    async def data_set(self) -> bytes:
        """Another answer than before: Redis was restarted, emptied or replaced since.

        Then records of workers that are well may be missing for a while. Ask after `read`.
        """
        parts = await self._data_set(self._redis, [self._mark_key], secrets.token_hex(8))
        return b":".join(parts)

    def _decode(self, worker_id: str, value: bytes) -> WorkerRecord | None:
        try:
            return msgspec.msgpack.decode(value, type=WorkerRecord)
        except msgspec.DecodeError as error:
            self._leave_out(worker_id, [f"record cannot be read by this version: {error}"])
            return None

    def _agrees(self, record: WorkerRecord, contract: bytes) -> bool:
        if contract and (problems := _differences(record.contract, contract)):
            self._leave_out(record.worker_id, problems)
            return False
        self._left_out.discard(record.worker_id)
        return True

    def _leave_out(self, worker_id: str, problems: list[str]) -> None:
        if worker_id not in self._left_out:
            self._left_out.add(worker_id)
            logger.warning("worker %s is left out: its %s", worker_id, "; its ".join(problems))

    async def _drop(self, worker_ids: list[str]) -> None:
        keys = [self._workers_key, self._contract_key, *map(self._record_key, worker_ids)]
        await self._drop_dead(self._redis, keys, *worker_ids)

    def _contract_key_of(self, generation: str) -> str:
        return f"{self._contract_key}:{generation}" if generation else self._contract_key

    def _record_key(self, worker_id: str) -> str:
        return self._record_prefix + worker_id


def _shared(contract: Contract) -> bytes:
    """What is equal on all workers, as bytes that can be compared."""
    return msgspec.msgpack.encode(msgspec.structs.replace(contract, tensor_parallel=1))


def _differences(mine: Contract, cluster: bytes) -> list[str]:
    try:
        return mine.differences(msgspec.msgpack.decode(cluster, type=Contract))
    except msgspec.DecodeError as error:
        return [f"version of Tandem is not the cluster's, whose contract has other fields: {error}"]


def _bytes(value: bytes | str) -> bytes:
    """redis-py's types admit str, for clients that decode replies; ours do not."""
    assert isinstance(value, bytes)
    return value
