"""Settings of every process: frozen dataclasses, composed per role, checked once at start.

Command lines and the Helm chart set these; nothing mutates them afterwards. A field is an option of
its program unless it is a `Constant`: `options.py`. Secrets (the URL of Redis, the cluster's token)
come from the environment, so that no process list shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter

from tandem.errors import ConfigError
from tandem.options import (
    Constant,
    Count,
    Name,
    Options,
    Port,
    Positive,
    PositiveOrNone,
    PositiveSeconds,
    Seconds,
    Switch,
    Text,
    arguments,
    by_comma,
    option_name,
    to_int,
)

Role = Literal["prefill", "decode"]
Pool = Literal["router", "prefill", "decode"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
Numerics = Literal["fast", "invariant"]
Kernels = Literal["auto", "native", "torch", "triton"]
WeightFormat = Literal["auto", "int8"]
Transport = Literal["auto", "nixl", "grpc"]
NixlTcp = Literal["off", "insecure"]
PrefillAt = Literal["auto", "remote", "local"]
VerifyBlocks = Literal["off", "sample", "all"]
Autoscale = Literal["off", "dry-run", "on"]

# Groups of options, in the order of help texts. Those of PROCESS depend on where a process runs,
# those of MEASUREMENT are for no operator.
PROCESS = Group("Process", sort_key=1)
_REQUESTS = Group("Requests", sort_key=2)
_HTTP = Group("HTTP", sort_key=3)
_AUTOSCALER = Group("Autoscaler", sort_key=4)
_ENGINE = Group("Engine", sort_key=5)
_TRANSFER = Group("KV transfer", sort_key=6)
_LIFECYCLE = Group("Lifecycle", sort_key=7)
MEASUREMENT = Group("Tests and measurements", sort_key=8)

_Own = Parameter(group=PROCESS)
_Http = Parameter(group=_HTTP)

ModelName = Annotated[
    str, Parameter(help="Hugging Face folder, GGUF file or hub name.", group=PROCESS)
]

ModelRevision = Annotated[
    Text, Parameter(help="Commit (never changes), tag or branch of a hub model.", group=PROCESS)
]

REDIS_URL_VARIABLE = "TANDEM_REDIS_URL"
TOKEN_VARIABLE = "TANDEM_CLUSTER_TOKEN"
CLUSTER_ID_VARIABLE = "TANDEM_CLUSTER_ID"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where a pod has its own


_SCALE_OBJECT = re.compile(r"(\w+)=((?:statefulsets|deployments)/[a-z0-9]([-a-z0-9.]*[a-z0-9])?)")


def parse_scale_objects(text: str) -> dict[str, str]:
    """`prefill=statefulsets/NAME,router=deployments/NAME` by pool. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        match = _SCALE_OBJECT.fullmatch(entry)
        if match is None or match[1] not in get_args(Pool) or match[1] in found:
            raise ConfigError(
                f"scale-objects has {entry!r}; it must be POOL=statefulsets/NAME or "
                f"POOL=deployments/NAME, once for a POOL of {', '.join(get_args(Pool))}"
            )
        found[match[1]] = match[2]
    return found


def _parse_cores(text: str) -> tuple[int, ...]:
    return tuple(to_int(core) for core in text.split(",") if core)


def _parse_hosts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.lower().split(",")))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings that every process of one cluster shares."""

    cluster_id: Annotated[str, Parameter(env_var=CLUSTER_ID_VARIABLE)]
    """Name of the cluster, which its keys in Redis and its processes have."""
    redis_url: Annotated[str, Parameter(env_var=REDIS_URL_VARIABLE)] = field(repr=False)
    """URL of Redis, with its password."""
    token: Annotated[str, Parameter(env_var=TOKEN_VARIABLE)] = field(repr=False)
    """Token with which calls between the cluster's processes authenticate."""
    record_ttl_s: float = 5.0  # a worker whose record is older is dead
    record_interval_s: float = 1.0

    @classmethod
    def from_environment(cls) -> ClusterConfig:
        """Raises ConfigError naming the variable that is missing."""
        values: dict[str, Any] = {}
        for argument in arguments(cls):
            for variable in argument.parameter.env_var or ():
                if not os.environ.get(variable):
                    raise ConfigError(f"the environment variable {variable} is not set")
                values[argument.keys[0]] = os.environ[variable]
        return cls(**values)


@Parameter(name="*", group=_ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """The options of an engine: how its model is computed, its KV pool and its scheduler."""

    device: Device = "auto"
    """Device that computes the model. auto: CUDA where there is a GPU."""
    dtype: Dtype = "auto"
    """Data type of the computation. auto: bfloat16 where the hardware has it, else float32."""
    kv_dtype: Dtype = "auto"
    """Data type of the KV pool. auto: that of the computation."""
    numerics: Numerics = "fast"
    """invariant: float32, and a sequence's tokens depend on no other sequence."""
    kernels: Kernels = "auto"
    """Kernels: native (C++ on CPUs), triton (CUDA) or torch. auto: the fastest ones that fit."""
    weights: WeightFormat = "auto"
    """Format of the weights. auto: the data type of the computation; int8: native kernels only."""
    block_size: Positive = 16
    """Number of tokens in a KV block."""
    kv_bytes_max: Annotated[Positive, Parameter(name="--kv-memory")] = 1 << 30
    """Memory of a worker's KV pool, in bytes."""
    num_blocks: PositiveOrNone = None
    """Number of blocks in the KV pool, instead of --kv-memory. 0: by memory."""
    max_model_len: PositiveOrNone = None
    """Largest number of tokens in a sequence. 0: what the model was trained for."""
    max_num_seqs: Positive = 64
    """Largest number of sequences in one step."""
    max_tokens_per_step: PositiveOrNone = None
    """Largest number of tokens in one step. 0: 512, on CUDA by the card."""
    itl_target_s: Seconds = 0.1
    """Seconds to each next token, to which chunks of prompts in the same step are cut. 0: off."""
    itl_limit_s: Seconds = 0.0
    """Seconds to each next token; a sequence that would make them longer waits. 0: off."""
    queue_max: Positive = 256
    """Largest number of waiting sequences; a worker refuses further ones."""
    num_threads: Annotated[Positive, Parameter(name="--threads")] = 1
    """Number of threads of a worker's engine."""

    def check_together(self) -> None:
        if self.numerics == "invariant" and "bfloat16" in (self.dtype, self.kv_dtype):
            raise ConfigError("numerics=invariant computes in float32; use dtype auto or float32")


@Parameter(name="*", group=_ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The settings of one engine: a model, its KV pool and its scheduler."""

    model: ModelName
    model_revision: ModelRevision = ""


@Parameter(name="*", group=_TRANSFER)
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(Options):
    """Settings of how KV blocks travel to this worker, and of what is done when they do not."""

    transport: Transport = "auto"
    """Transport of KV blocks. auto: the fastest one that works between two workers."""
    nixl_tcp: NixlTcp = "off"
    """insecure: NIXL may use TCP. Anyone who reaches its port can write the worker's memory."""
    prefill_at: PrefillAt = "auto"
    """Pool that computes longer prompts. auto: the one with the lower predicted time."""
    local_prefill_max_tokens: Count = 64
    """Largest number of missing tokens that a decode worker always prefills itself."""
    verify_blocks: VerifyBlocks = "off"
    """Pulled blocks whose checksums are compared."""
    delay_s: Annotated[Seconds, Parameter(group=MEASUREMENT, name="--transfer-delay")] = 0.0
    """Seconds that are added to each pull, for tests."""
    overlap: Annotated[bool, Parameter(group=MEASUREMENT)] = True
    """Pull blocks while the next ones are computed. Without it, pulls start after the last one."""
    heartbeat_timeout_s: PositiveSeconds = 30.0
    """Seconds without a step, after which a worker that blocks are pulled from counts as hung."""
    pull_deadline_s: PositiveSeconds = 30.0
    """Seconds for one run of blocks; later its blocks are quarantined."""
    warm_blocks: Count = 0
    """Number of KV blocks that a new worker imports from its peers. 0: it starts cold."""
    connect_deadline_s: Constant[float] = 5.0
    heartbeat_interval_s: Constant[float] = 0.5  # of a producer, on the lease's stream
    release_deadline_s: Constant[float] = 5.0
    quarantine_blocks_max: Constant[int] = 256  # beyond it no pulls until the agent is made anew
    leases_max: Constant[int] = 256  # open at one producer; beyond it refused
    leases_per_consumer_max: Constant[int] = 128
    pull_bytes_in_flight_max: Constant[Positive] = 256 << 20  # of this consumer; half from one peer
    leased_blocks_max_share: Constant[float] = 0.9  # of the pool, finished and not yet released

    @property
    def verify_every(self) -> int:
        """Interval of blocks whose checksums are compared; 0: none are."""
        return {"off": 0, "sample": 16, "all": 1}[self.verify_blocks]


@Parameter(name="*", group=_LIFECYCLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(Options):
    """`tandem worker` runs one worker until it is drained. Its secrets come from the environment.

    The exit status is 0 after a drain, 1 when the engine ended or no more blocks can be pulled, and
    2 for wrong settings or a worker that does not fit the others, which no restart would mend.
    """

    role: Annotated[Role, _Own]
    """Pool of the worker."""
    worker_id: Annotated[Text, _Own] = ""
    """Name of the worker. Default: the role and a random number."""
    host: Annotated[str, _Own] = "127.0.0.1"
    """Address at which routers and peers reach the worker."""
    port: Annotated[Port, _Own] = 0
    """Port of gRPC. 0: chosen by the system."""
    metrics_port: Annotated[Port, _Own] = 0
    """Port of metrics and probes. 0: chosen by the system."""
    start_deadline_s: Annotated[Seconds, _Own] = 1800.0
    """Seconds for the model's download, conversion and loading."""
    cores: Annotated[tuple[int, ...], _Own, by_comma("N,...", _parse_cores)] = ()
    """Cores to pin the engine to, such as 0 or 0,1. Default: any."""
    engine_hang_timeout_s: PositiveSeconds = 60.0
    """Seconds without a turn of a busy engine, after which the worker ends it and itself."""
    generation: Name = ""
    """Name that differs from that of the workers to be replaced, in an upgrade that changes KV."""
    drain_deadline_s: Seconds = 30.0
    """Seconds for live requests to migrate or end once the worker is told to stop."""
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerOptions):
    """The settings of one worker: an engine process and an I/O process, in one of the two pools."""

    cluster: Constant[ClusterConfig]


def _autoscale_name(field_name: str) -> str:
    return f"autoscale-{option_name(field_name)}"


AutoscaleMode = Annotated[
    Autoscale,
    Parameter(
        name="--autoscale",
        help="Pool sizes follow the load. dry-run: wanted sizes are exported, for an HPA or KEDA.",
    ),
]


@Parameter(name="*", group=_AUTOSCALER, name_transform=_autoscale_name)
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig(Options):
    """Targets and bounds of the autoscaler, which `services/tandem/autoscaler` explains."""

    mode: AutoscaleMode = "off"
    prefill_min: Count = 1
    """Smallest number of prefill workers."""
    prefill_max: Count = 8
    """Largest number of prefill workers."""
    decode_min: Count = 1
    """Smallest number of decode workers."""
    decode_max: Count = 8
    """Largest number of decode workers."""
    ttft_s: PositiveSeconds = 2.0
    """Service level of the time to first token, in seconds."""
    ttft_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to that service level."""
    itl_s: PositiveSeconds = 0.1
    """Service level of the time to each next token, in seconds."""
    cold_start_s: Seconds = 90.0
    """Seconds from asking for a worker to its first request."""
    interval_s: PositiveSeconds = 10.0
    """Seconds between two decisions."""
    history_s: Constant[float] = 600.0  # of load, that forecasts are drawn from
    load_quantile: Constant[float] = 0.7  # of ten seconds, to be carried: bursts may queue
    slo_quantile: Constant[float] = 0.95  # of times, that is to be within the limits
    utilization: Constant[float] = 0.9  # of a worker's time, at that load
    kv_use_max: Constant[float] = 0.85  # of a decode worker's KV pool
    down_window_s: Constant[float] = 600.0  # a pool shrinks to the most that was to be kept in it
    # A smaller pool must be asked less than this share of what it carries. 0.8 shrinks later: fewer
    # changes and misses for 6% more worker-hours (docs/autoscaler.md).
    down_margin: Constant[float] = 1.0
    down_interval_s: Constant[float] = 60.0  # between two steps down
    step_down: Constant[float] = 0.25  # of the pool at once, at least one worker
    reversal_s: Constant[float] = 600.0  # at most one change of direction in it

    def check_together(self) -> None:
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"{pool}_min"), getattr(self, f"{pool}_max")
            if least > most:
                raise ConfigError(
                    f"autoscale-{pool}-min is {least} and autoscale-{pool}-max is {most}; "
                    "0 <= min <= max is allowed"
                )


@Parameter(name="*", group=_REQUESTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions(Options):
    """The options of a router that say which requests it refuses or delays."""

    ttft_limit_s: Seconds = 120.0
    """Largest predicted seconds to a first token; a request above it is refused (429). 0: off."""
    ttft_limit_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to that limit."""
    trust_tenant_header: Switch = False
    """Heed x-tandem-tenant. Only behind a gateway that sets it and drops a client's own."""
    allow_anonymous: Annotated[Switch, _Own] = False
    """Serve everybody while there is no API key, on an address that is not loopback, too."""
    keys_file: Annotated[Text, _Own] = ""
    """JSON file of key records, such as a mounted Secret, beside the keys in Redis."""
    keys_max_age_s: Seconds = 0.0
    """Seconds without news of the keys, after which requests with keys are refused. 0: never."""


@Parameter(name="*", group=_REQUESTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(AdmissionOptions):
    """`tandem router` runs one replica of the router. Its secrets come from the environment."""

    model: ModelName
    model_revision: ModelRevision = ""
    served_model_name: Annotated[Text, _Own] = ""
    """Name of the model in the API. Default: the model's own name."""
    host: Annotated[str, _Own] = "127.0.0.1"
    """Address of both public ports."""
    http_port: Annotated[Port, _Own] = 8000
    """Port of the HTTP API."""
    grpc_port: Annotated[Port, _Own] = 8001
    """Port of the gRPC API."""
    router_id: Annotated[str, _Own] = "router-0"
    """Name of the router."""
    # Pool -> RESOURCE/NAME, in this pod's namespace: whose scale is the pool's size on Kubernetes.
    scale_objects: Annotated[
        Mapping[str, str],
        _Own,
        by_comma("POOL=RESOURCE/NAME,...", parse_scale_objects),
    ] = field(default_factory=dict)
    """Objects of Kubernetes whose scale is a pool's size. Default: the pool controller sets it."""
    tokenizer_processes: Positive = 1
    """Number of processes that render and tokenize prompts."""
    lookup_deadline_s: Seconds = 0.02
    """Seconds that placement waits for the prefix tree. Raise it for a Redis that is far away."""
    hold_deadline_s: Seconds = 30.0
    """Seconds that a request waits for an empty pool. To start from zero: over a cold start."""
    drain_deadline_s: Seconds = 30.0
    """Seconds for live requests to end once the router is told to stop."""
    header_bytes_max: Annotated[Positive, _Http] = 64 << 10
    """Largest request header, in bytes."""
    headers_max: Annotated[Positive, _Http] = 100
    """Largest number of fields in a request header."""
    header_deadline_s: Annotated[PositiveSeconds, _Http] = 10.0
    """Seconds from the first byte of a header to its end."""
    body_deadline_s: Annotated[PositiveSeconds, _Http] = 60.0
    """Seconds from the end of a header to the end of the body."""
    keep_alive_s: Annotated[PositiveSeconds, _Http] = 75.0
    """Seconds that a connection may be idle. Clients should close idle connections sooner."""
    send_deadline_s: Annotated[PositiveSeconds, _Http] = 60.0
    """Seconds that a client may take no byte of its answer; then it is cut. Also for gRPC."""
    connections_max: Annotated[Positive, _Http] = 4096
    """Largest number of open connections."""
    allowed_hosts: Annotated[tuple[str, ...], _Http, by_comma("NAME,...", _parse_hosts)] = ()
    """Further names in `Host` that a router on a loopback address accepts, such as a proxy's."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    body_bytes_max: Constant[Positive] = 4 << 20
    hold_requests_max: Constant[Positive] = 256  # while a pool is empty; as many for tenants' turns
    request_deadline_s: Constant[float] = 600.0
    service_account: Constant[str] = SERVICE_ACCOUNT  # the folder with its token


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterOptions):
    """The settings of one replica of the router."""

    cluster: Constant[ClusterConfig]
