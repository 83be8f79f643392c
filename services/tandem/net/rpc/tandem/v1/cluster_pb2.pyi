from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("name", "wanted", "running", "ready", "serving")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    wanted: int
    running: int
    ready: int
    serving: int
    def __init__(self, name: _Optional[str] = ..., wanted: _Optional[int] = ..., running: _Optional[int] = ..., ready: _Optional[int] = ..., serving: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "role", "pool", "state", "num_running", "num_waiting", "num_leases", "kv_use", "num_ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    pool: str
    state: str
    num_running: int
    num_waiting: int
    num_leases: int
    kv_use: float
    num_ranks: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_leases: _Optional[int] = ..., kv_use: _Optional[float] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class AutoscaleDecision(_message.Message):
    __slots__ = ("pool", "size", "why")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    pool: str
    size: int
    why: str
    def __init__(self, pool: _Optional[str] = ..., size: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("pools", "workers", "decisions")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolState]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    decisions: _containers.RepeatedCompositeFieldContainer[AutoscaleDecision]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolState, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[AutoscaleDecision, _Mapping]]] = ...) -> None: ...

class ScalePoolsRequest(_message.Message):
    __slots__ = ("sizes",)
    class SizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.ScalarMap[str, int]
    def __init__(self, sizes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ScalePoolsResponse(_message.Message):
    __slots__ = ("wanted",)
    class WantedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.ScalarMap[str, int]
    def __init__(self, wanted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SetWorkerRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetWorkerRoleResponse(_message.Message):
    __slots__ = ("worker_id", "role", "took_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    took_s: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., took_s: _Optional[float] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "deadline_s", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_s: float
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., force: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetWorkersCacheRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ResetWorkersCacheResponse(_message.Message):
    __slots__ = ("dropped_blocks",)
    class DroppedBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: _containers.ScalarMap[str, int]
    def __init__(self, dropped_blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LoadLoraAdapterRequest(_message.Message):
    __slots__ = ("lora_name", "lora_path", "load_inplace")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    LOAD_INPLACE_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_path: str
    load_inplace: bool
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ..., load_inplace: bool = ...) -> None: ...

class LoadLoraAdapterResponse(_message.Message):
    __slots__ = ("digest", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    refused: _containers.ScalarMap[str, str]
    def __init__(self, digest: _Optional[str] = ..., refused: _Optional[_Mapping[str, str]] = ...) -> None: ...

class UnloadLoraAdapterRequest(_message.Message):
    __slots__ = ("lora_name",)
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    def __init__(self, lora_name: _Optional[str] = ...) -> None: ...

class UnloadLoraAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
