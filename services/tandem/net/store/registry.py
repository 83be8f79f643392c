"""Worker records in Redis. They say which workers are alive, and have the address, state and KV
compatibility of each worker.

The keys in Redis begin with the hash tag `{tandem:CLUSTER}`, so they share a slot of Redis Cluster:

    {tandem:CLUSTER}:workers              SET of worker ids that registered and did not leave
    {tandem:CLUSTER}:worker:ID            msgpack WorkerRecord, with a time to live
    {tandem:CLUSTER}:worker:ID:pairs      bandwidths from the worker's peers (pair_rates.py)
    {tandem:CLUSTER}:worker:ID:role       the worker's role while it is lent to the other pool
    {tandem:CLUSTER}:contract             msgpack KvCompatibility, with a time to live
    {tandem:CLUSTER}:contract:GENERATION  the KvCompatibility of a named generation
    {tandem:CLUSTER}:loading              HASH, msgpack LoadingNotice of workers without a record
    {tandem:CLUSTER}:mark                 random value, set by `read_all`; missing after a data loss

A worker writes its record every `record_interval_s`. If the worker stops, the record expires after
`record_ttl_s`, and the worker then counts as dead.

A KV compatibility is the list of properties that two workers must share to exchange KV. The first
worker stores its KV compatibility for the cluster. A worker with other properties is refused with a
message that names each difference, and readers ignore the worker's record. The KV compatibility is
deleted together with the last worker.

A worker that works for the other pool for a while is *lent*. The role of a lent worker has a key of
its own, so that a worker whose process has crashed is restarted in this role. The key expires
`LOAN_TTL_S` after the last write of the worker's record. A worker that shuts down normally deletes
the key.

After an upgrade, new workers may be unable to exchange KV with the running workers. The new workers
are then another *generation*, which has a KV compatibility of its own. Both generations serve until
the old generation has drained. Whether two workers may exchange KV depends only on their KV
compatibility, not on the name of the generation. Encode workers are a generation of their own, too.

If the cluster serves several models, the workers of each further model are a *group*. Each group
has generations of its own (`generation_of`), and readers ignore the workers of other groups.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, Self, get_args

import msgspec

from tandem.common.adapter import NO_ADAPTER, Adapter
from tandem.common.block_hash import Chain, chain_root
from tandem.common.config.cluster import ClusterConfig, Role
from tandem.common.engine_counts import EngineCounts
from tandem.common.perf_model.rates import PairRate, WorkerRates
from tandem.common.worker_load import TierUse, WorkerLoad
from tandem.errors import Incompatible
from tandem.net.store.client import UNREADABLE, Client
from tandem.net.store.pair_rates import encode_bandwidths, pairs_key
from tandem.net.store.script import Script

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining"]
PROTOCOL_VERSION = 1
# Seconds for which the role of a lent worker is kept after the last write of the worker's record. A
# restarted worker needs less time to load the model.
LOAN_TTL_S = 3600.0


# Ends the generation's name of an encode worker. No --generation has a `#`.
ENCODE_GENERATION = "#encode"


def generation_of(group: str, name: str) -> str:
    """Returns the generation of a worker of a model's group, for its `--generation`. `group` is
    empty for the first model."""
    return f"{group}/{name}" if group else name


class KvCompatibility(msgspec.Struct, frozen=True):
    """The properties that two workers must share to exchange KV. All fields must be equal, except
    `tensor_parallel`, which may differ."""

    model_fingerprint: str
    compute_dtype: str
    numerics: str
    block_size: int
    kv_dtype: str
    layout: str
    hash_version: int
    protocol_version: int = PROTOCOL_VERSION
    tensor_parallel: int = 1

    @classmethod
    def of_encode_worker(cls, model_fingerprint: str) -> Self:
        """Returns what encode workers of one cluster share. They have no KV, so they are a
        generation of their own (`ENCODE_GENERATION`)."""
        return cls(
            model_fingerprint=model_fingerprint,
            compute_dtype="float32",
            numerics="",
            block_size=0,
            kv_dtype="",
            layout="images",
            hash_version=0,
        )

    def differences(self, other: KvCompatibility) -> list[str]:
        """Returns a phrase for each difference that prevents an exchange of KV. The list is empty
        if the two workers can exchange KV.
        """
        return [
            f"{name} is {getattr(self, name)!r}, not {getattr(other, name)!r}"
            for name in self.__struct_fields__
            if name != "tensor_parallel" and getattr(self, name) != getattr(other, name)
        ]

    @property
    def has_windows(self) -> bool:
        """True if the model has KV groups for layers with a sliding window. These groups free
        blocks outside the window.

        So a worker may hold a block without the earlier blocks of the prompt.
        """
        return "window=" in self.layout

    @property
    def has_windows_only(self) -> bool:
        """True if every layer has a sliding window, so that no KV pool holds all blocks of a long
        prompt."""
        return self.has_windows and "window=none" not in self.layout

    @property
    def has_states(self) -> bool:
        """True if some layers keep states in place of keys and values. A request can then resume
        only at the positions at which states are frozen."""
        return "states heads=" in self.layout

    def compatibility_key(self) -> bytes:
        """Returns bytes that are equal for two workers if and only if the workers can exchange
        KV."""
        return _shared(self)

    def chain_root(self, cache_salt: bytes = b"", adapter: str = NO_ADAPTER) -> bytes:
        """Returns the value with which the chain of block hashes of a prompt starts. `adapter` is
        the digest of the prompt's LoRA adapter."""
        return chain_root(
            model_fingerprint=self.model_fingerprint,
            compute_dtype=self.compute_dtype,
            numerics=self.numerics,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            adapter=adapter,
            cache_salt=cache_salt,
        )

    def chain(self, cache_salt: bytes = b"", adapter: str = NO_ADAPTER) -> Chain:
        """Returns the parameters of a prompt's chain of block hashes: the start value and the block
        size."""
        return Chain(self.chain_root(cache_salt, adapter), self.block_size)


class AdapterState(msgspec.Struct, frozen=True):
    """The LoRA adapters of a worker."""

    named: list[Adapter] = []  # adapters that the worker serves by name
    loaded: list[str] = []  # digests of the adapters in the engine's memory
    failed: list[str] = []  # digests of adapters that the worker recently failed to read
    rank_max: int = 0  # largest adapter rank that the worker can load; 0: no adapters


class LoadingNotice(msgspec.Struct, frozen=True):
    """The progress of a worker that is still loading the model. As long as `num_writes` grows, the
    worker is alive."""

    pool: str  # such as "decode", or "qwen.decode" for a worker of the group "qwen"
    num_bytes: int = 0  # number of bytes of the model's weights that are already loaded
    num_bytes_all: int = 0  # number of bytes of all weights of the model; 0: unknown
    num_writes: int = 0
    failed: str = ""  # why the process ended before it could serve; empty while the process runs


class WorkerRecord(msgspec.Struct, frozen=True, rename={"compatibility": "contract"}):
    worker_id: str
    # Epoch of the worker's log in the prefix tree. It changes when the process starts, and when the
    # worker publishes all held blocks again.
    epoch: str
    role: str  # the worker's current role, "prefill", "decode" or "encode"
    state: State
    address: str  # HOST:PORT of the worker's gRPC service
    metrics_address: str
    host: str  # machine on which the worker runs
    pid: int
    model: str  # name under which the model is served
    max_model_len: int
    compatibility: KvCompatibility
    load: WorkerLoad = WorkerLoad()
    counts: EngineCounts = EngineCounts()
    rates: WorkerRates = WorkerRates()
    pairs: dict[str, PairRate] = {}  # worker id of a peer -> measured rate of pulls from the peer
    started_at: float = 0.0  # Unix time at which the process was started
    generation: str = ""  # name of the worker's generation; empty: the generation without a name
    group: str = ""  # group of pools that the worker belongs to; empty: that of the first model
    # The pool for which the worker was started. While the worker is lent, it differs from `role`.
    pool: str = ""
    # Free and total main memory of the worker's machine or container. A total of 0 means that the
    # worker has not reported them.
    memory_free_bytes: int = 0
    memory_total_bytes: int = 0
    adapters: AdapterState = AdapterState()
    num_writes: int = 0  # how often the process has written this record; 0: not reported
    written_at: float = 0.0  # Unix time of this write by the worker's clock; 0: not reported
    # Free bytes and size of one disk. A worker may use a disk for the log file and another one for
    # copies of KV blocks. The fields are those of the fuller disk. A size of 0 means that the
    # worker uses no disk or has not reported the fields.
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    # worker id of a peer -> reason why this worker cannot read blocks of the peer
    unreachable: dict[str, str] = {}
    # The KV cache tiers below the KV pool, such as host memory and disk, fastest tier first.
    tiers: tuple[TierUse, ...] = ()
    # The worker's setting `prefill_at`, such as "local"; empty: not reported.
    prefill_at: str = ""
    kernels: str = ""  # the kernels that compute, such as "torch"; empty: not reported
    num_ranks: int = 1  # number of processes that compute each step of the worker together
    # True: the worker refuses a request whose first token would be too late (`first_token_s` of the
    # message SubmitSequence).
    keeps_deadlines: bool = False

    @property
    def has_kv(self) -> bool:
        """False for an encode worker, which computes images and takes no requests."""
        return self.role != "encode"

    @property
    def transports(self) -> dict[str, str]:
        """Worker id of a peer -> transport of pulls from the peer: "cuda_ipc", "nixl" or "grpc"."""
        return {peer: rate.transport for peer, rate in self.pairs.items()}


# Reads the records of all workers. Scripts begin or end with it, so that no process needs another
# round trip for them.
#
# KEYS[1]   the set of workers
# KEYS[2]   the KV compatibility
# ARGV[1]   the beginning of the records' keys
# sets      `ids` to the ids of the workers, and `values` to the KV compatibility and the record of
#           each worker
_RECORDS = """
local ids = redis.call('SMEMBERS', KEYS[1])
local values = {redis.call('GET', KEYS[2])}
for first = 1, #ids, 1000 do
  local keys = {}
  for i = first, math.min(first + 999, #ids) do keys[#keys + 1] = ARGV[1] .. ids[i] end
  for _, value in ipairs(redis.call('MGET', unpack(keys))) do values[#values + 1] = value end
end
"""

# Writes the keys of a worker, and renews the time to live of these keys. The KV compatibility is
# written only if none is stored, or if the stored one equals the worker's. Then reads the records.
#
# KEYS[1]   the set of workers; all keys are in one hash slot
# KEYS[2]   the KV compatibility of the generation without a name
# KEYS[3]   the worker's record
# KEYS[4]   the KV compatibility of the worker's generation
# KEYS[5]   the bandwidths from the worker's peers
# KEYS[6]   the role of the worker while it is lent
# ARGV[1]   the beginning of the records' keys
# ARGV[2]   worker id
# ARGV[3]   value of the record
# ARGV[4]   value of the KV compatibility
# ARGV[5]   time to live of all keys but the role, in milliseconds
# ARGV[6]   value of the bandwidths
# ARGV[7]   value of the role; empty: the worker is not lent
# ARGV[8]   time to live of the role, in milliseconds
# returns   {ids, values} of `_RECORDS`
_WRITE = Script(
    """
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[5])
redis.call('SET', KEYS[5], ARGV[6], 'PX', ARGV[5])
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
local contract = redis.call('GET', KEYS[4])
if not contract or contract == ARGV[4] then
  redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[5])
end
if ARGV[7] == '' then
  redis.call('DEL', KEYS[6])
else
  redis.call('SET', KEYS[6], ARGV[7], 'PX', ARGV[8])
end
"""
    + _RECORDS
    + "return {ids, values}"
)

# Removes those of the given workers that have no record from the set of workers. If the set is then
# empty, also deletes the KV compatibility.
#
# KEYS[1]         the set of workers
# KEYS[2]         the KV compatibility
# KEYS[3], ...    the records of the given workers
# ARGV            the ids of the given workers, in the same order
# returns         nothing
_DROP_DEAD = Script("""
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then redis.call('SREM', KEYS[1], ARGV[i - 2]) end
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
""")

_READ = Script(_RECORDS + "return {ids, values}")

# Reads the records, and what else a router needs. If the mark is missing, sets it.
#
# KEYS[3]        the loading notices
# KEYS[4]        the mark
# KEYS[5], ...   further keys
# ARGV[2]        the value that a missing mark gets
# returns        {ids, values, loading notices, the server's run id, the mark, {further values}}
_READ_ALL = Script(
    _RECORDS
    + """
redis.call('SET', KEYS[4], ARGV[2], 'NX')
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local more = redis.call('MGET', unpack(KEYS, 5))
return {ids, values, redis.call('HGETALL', KEYS[3]), run_id or '', redis.call('GET', KEYS[4]), more}
"""
)


class ClusterRead(NamedTuple):
    """What `Registry.read_all` has read at one moment."""

    records: list[WorkerRecord]
    loading: dict[str, LoadingNotice]  # loading notices by worker id, including those of dead ones
    # A value that changes if Redis was restarted, emptied or replaced. After a restart of Redis,
    # records of healthy workers may be missing for a while.
    data_set: bytes
    more: list[bytes | None]  # the values of the further keys


class Registry:
    """Reads and writes the records of one cluster. Errors of redis-py propagate."""

    def __init__(self, redis: Client, cluster: ClusterConfig) -> None:
        self._redis = redis
        prefix = f"{{tandem:{cluster.cluster_id}}}"
        self._workers_key = f"{prefix}:workers"
        self._compatibility_key = f"{prefix}:contract"
        self._record_prefix = f"{prefix}:worker:"
        self._ttl_ms = round(cluster.record_ttl_s * 1000)
        self._loading_key = f"{prefix}:loading"
        self._mark_key = f"{prefix}:mark"
        # Ids of workers whose record was skipped and logged. Each skipped record is logged only
        # once.
        self._left_out: set[str] = set()

    async def check_compatibility(
        self, compatibility: KvCompatibility, generation: str = ""
    ) -> None:
        """Compares a worker's KV compatibility with the stored one of the worker's generation.
        Raises Incompatible if they differ; the error names the differences.

        If the generation has no stored KV compatibility yet, stores the worker's.
        """
        key = self._compatibility_key_of(generation)
        await self._redis.set(key, _shared(compatibility), nx=True, px=self._ttl_ms)
        found = await self._redis.get(key)
        if found is not None and (differences := _differences(compatibility, _bytes(found))):
            raise Incompatible(
                f"this worker cannot join the cluster: its {'; its '.join(differences)}. All "
                "workers of a cluster need the same model and the same KV options"
            )

    async def write(self, record: WorkerRecord, loan: str = "") -> list[WorkerRecord]:
        """Writes a worker's record, and returns the records of all live workers as `read` does.
        Also renews the time to live of the KV compatibility of the worker's generation.

        `loan` is the current role of a lent worker, or "" if the worker is not lent. After a crash,
        the worker's next process starts in this role.
        """
        record_key = self._record_key(record.worker_id)
        ids, values = await _WRITE(
            self._redis,
            [
                *(self._workers_key, self._compatibility_key, record_key),
                self._compatibility_key_of(record.generation),
                *(pairs_key(record_key), f"{record_key}:role"),
            ],
            self._record_prefix,
            record.worker_id,
            msgspec.msgpack.encode(record),
            _shared(record.compatibility),
            self._ttl_ms,
            encode_bandwidths(record.pairs),
            loan,
            round(LOAN_TTL_S * 1000),
        )
        return await self._records(ids, values)

    async def read_loan(self, worker_id: str) -> Role | None:
        """Returns the role that the worker's last process had as a lent worker.

        Returns None if the worker was not lent, or if the last process shut down normally.
        """
        found = await self._redis.get(f"{self._record_key(worker_id)}:role")
        return next((role for role in get_args(Role) if found == role.encode()), None)

    async def remove(self, worker_id: str) -> None:
        """Removes a worker that shuts down normally. If no worker is left, also removes the KV
        compatibility."""
        record_key = self._record_key(worker_id)
        await self._redis.delete(record_key, pairs_key(record_key))
        await self._drop([worker_id])

    async def read(self) -> list[WorkerRecord]:
        """Returns the records of all live workers, in the order of their ids. Ids whose record has
        expired are removed from Redis.

        A record is skipped if this version cannot read it, or if the worker's KV compatibility
        differs from the stored one of the worker's generation. Each skipped record is logged once.
        """
        keys = [self._workers_key, self._compatibility_key]
        ids, values = await _READ(self._redis, keys, self._record_prefix)
        return await self._records(ids, values)

    async def read_all(self, more: Sequence[str]) -> ClusterRead:
        """Returns what a router needs to know of the cluster: the records as `read` does, and what
        else is in `ClusterRead`. `more` are further keys to read. Notices that this version cannot
        read are skipped."""
        keys = [self._workers_key, self._compatibility_key, self._loading_key, self._mark_key]
        ids, values, loading, run_id, mark, found = await _READ_ALL(
            self._redis, [*keys, *more], self._record_prefix, secrets.token_hex(8)
        )
        notices = {}
        for worker_id, value in zip(loading[::2], loading[1::2], strict=True):
            with suppress(*UNREADABLE):
                notice = msgspec.msgpack.decode(value, type=LoadingNotice)
                notices[worker_id.decode(errors="replace")] = notice
        records = await self._records(ids, values)
        return ClusterRead(records, notices, b":".join((run_id, mark)), found)

    async def _records(self, ids: list[bytes], values: list[bytes | None]) -> list[WorkerRecord]:
        """Decodes what `_RECORDS` has read."""
        compatibility, *encoded = values
        found = dict(sorted(zip((i.decode(errors="replace") for i in ids), encoded, strict=True)))
        self._left_out.intersection_update(found)
        if dead := [worker_id for worker_id, value in found.items() if value is None]:
            await self._drop(dead)
        records = [
            record
            for worker_id, value in found.items()
            if value is not None and (record := self._decode(worker_id, value)) is not None
        ]
        compatibilities = await self._compatibilities(
            {r.generation for r in records}, compatibility
        )
        return [r for r in records if self._agrees(r, compatibilities[r.generation])]

    async def tell_loading(self, worker_id: str, loading: LoadingNotice) -> None:
        """Writes the loading notice of a worker that has no record yet."""
        await self._redis.hset(self._loading_key, worker_id, msgspec.msgpack.encode(loading))

    async def end_loading(self, *worker_ids: str) -> None:
        """Deletes the loading notices of these workers."""
        await self._redis.hdel(self._loading_key, *worker_ids)

    async def _compatibilities(
        self, generations: set[str], unnamed: bytes | None
    ) -> dict[str, bytes]:
        """Returns generation -> encoded KV compatibility, or b"" if the KV compatibility has
        expired. `unnamed` is the KV compatibility of the generation without a name. The caller has
        already read it."""
        compatibilities = {"": unnamed or b""}
        if named := sorted(generations - {""}):
            replies = await self._redis.mget([self._compatibility_key_of(name) for name in named])
            values = (b"" if reply is None else _bytes(reply) for reply in replies)
            compatibilities.update(zip(named, values, strict=True))
        return compatibilities

    def _decode(self, worker_id: str, value: bytes) -> WorkerRecord | None:
        try:
            return msgspec.msgpack.decode(value, type=WorkerRecord)
        except UNREADABLE as error:
            self._leave_out(worker_id, [f"record cannot be read by this version: {error}"])
            return None

    def _agrees(self, record: WorkerRecord, compatibility: bytes) -> bool:
        if compatibility and (problems := _differences(record.compatibility, compatibility)):
            self._leave_out(record.worker_id, problems)
            return False
        self._left_out.discard(record.worker_id)
        return True

    def _leave_out(self, worker_id: str, problems: list[str]) -> None:
        if worker_id not in self._left_out:
            self._left_out.add(worker_id)
            logger.warning(
                "worker %s is ignored, because it cannot exchange KV blocks with the cluster's "
                "workers: its %s",
                worker_id,
                "; its ".join(problems),
            )

    async def _drop(self, worker_ids: list[str]) -> None:
        keys = [self._workers_key, self._compatibility_key, *map(self._record_key, worker_ids)]
        await _DROP_DEAD(self._redis, keys, *worker_ids)

    def _compatibility_key_of(self, generation: str) -> str:
        return f"{self._compatibility_key}:{generation}" if generation else self._compatibility_key

    def _record_key(self, worker_id: str) -> str:
        return self._record_prefix + worker_id


def _shared(compatibility: KvCompatibility) -> bytes:
    """Returns the encoded fields that must be equal for an exchange of KV."""
    return msgspec.msgpack.encode(msgspec.structs.replace(compatibility, tensor_parallel=1))


def _differences(mine: KvCompatibility, cluster: bytes) -> list[str]:
    try:
        return mine.differences(msgspec.msgpack.decode(cluster, type=KvCompatibility))
    except UNREADABLE as error:
        return [
            "version of Tandem is not the cluster's (the cluster's record of the KV format has "
            f"other fields: {error})"
        ]


def _bytes(value: bytes | str) -> bytes:
    """Returns a reply, with the type bytes for type checkers. By redis-py's type hints, a reply may
    also be a str, but only a client with decode_responses=True returns a str."""
    assert isinstance(value, bytes)
    return value
