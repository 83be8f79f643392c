"""Settings of every process: frozen dataclasses, composed per role, checked once at start.

Command lines and the Helm chart set these; nothing mutates them afterwards. Secrets (the URL of
Redis, the cluster's token) come from the environment, so that no process list shows them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.errors import ConfigError

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

# Options whose names on the command line are shorter.
_OPTIONS = {
    "kv_bytes_max": "kv-memory",
    "num_threads": "threads",
    "itl_target_s": "itl-target",
    "itl_limit_s": "itl-limit",
    "ttft_limit_s": "ttft-limit",
    "ttft_limit_token_s": "ttft-limit-token",
    "drain_deadline_s": "drain-deadline",
    "start_deadline_s": "start-deadline",
    "hold_deadline_s": "hold-deadline",
    "header_deadline_s": "header-deadline",
    "body_deadline_s": "body-deadline",
    "keep_alive_s": "keep-alive",
}

REDIS_URL_VARIABLE = "TANDEM_REDIS_URL"
TOKEN_VARIABLE = "TANDEM_CLUSTER_TOKEN"
CLUSTER_ID_VARIABLE = "TANDEM_CLUSTER_ID"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where a pod has its own


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What every process of one cluster shares."""

    cluster_id: str  # names this cluster's keys in Redis and its processes
    redis_url: str = field(repr=False)
    token: str = field(repr=False)  # what internal calls authenticate with
    record_ttl_s: float = 5.0  # a worker whose record is older is dead
    record_interval_s: float = 1.0

    @classmethod
    def from_environment(cls) -> ClusterConfig:
        """Raises ConfigError naming the variable that is missing."""
        values = {}
        for name in (CLUSTER_ID_VARIABLE, REDIS_URL_VARIABLE, TOKEN_VARIABLE):
            if not os.environ.get(name):
                raise ConfigError(f"the environment variable {name} is not set")
            values[name] = os.environ[name]
        return cls(
            cluster_id=values[CLUSTER_ID_VARIABLE],
            redis_url=values[REDIS_URL_VARIABLE],
            token=values[TOKEN_VARIABLE],
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a model, its KV pool and its scheduler."""

    model: str  # a Hugging Face folder, a GGUF file or a hub name
    device: Device = "auto"
    dtype: Dtype = "auto"  # auto: bfloat16 where the hardware has it, else float32
    kv_dtype: Dtype = "auto"  # auto: the compute dtype
    numerics: Numerics = "fast"  # invariant: fp32, a sequence's tokens depend on nothing else
    kernels: Kernels = "auto"  # auto: C++ on a CPU, Triton on CUDA, where they fit, else torch
    weights: WeightFormat = "auto"  # auto: the compute dtype
    block_size: int = 16  # tokens a block
    kv_bytes_max: int = 1 << 30  # memory of the KV pool
    num_blocks: int | None = None  # instead of kv_bytes_max
    max_model_len: int | None = None  # tokens; default: what the model was trained for
    max_num_seqs: int = 64  # sequences in one step
    max_tokens_per_step: int | None = None  # token budget; default: 512, on CUDA by the card
    # From one token of a sequence to its next: chunks of prompts beside it are cut to that. 0: off
    itl_target_s: float = 0.1
    itl_limit_s: float = 0.0  # the same, that sequences wait for a seat by; 0: none
    queue_max: int = 256  # sequences that wait; beyond it QueueFull
    num_threads: int = 1

    def __post_init__(self) -> None:
        _check_choice("device", self.device, get_args(Device))
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("kv-dtype", self.kv_dtype, get_args(Dtype))
        _check_choice("numerics", self.numerics, get_args(Numerics))
        _check_choice("kernels", self.kernels, get_args(Kernels))
        _check_choice("weights", self.weights, get_args(WeightFormat))
        for name in ("block_size", "kv_bytes_max", "max_num_seqs"):
            _check_positive(name, getattr(self, name))
        for name in ("queue_max", "num_threads"):
            _check_positive(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len", "max_tokens_per_step"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _check_seconds("itl_target_s", self.itl_target_s)
        _check_seconds("itl_limit_s", self.itl_limit_s)
        if self.numerics == "invariant" and "bfloat16" in (self.dtype, self.kv_dtype):
            raise ConfigError("numerics=invariant computes in float32; use dtype auto or float32")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV blocks travel to this worker, and what is done when they do not."""

    transport: Transport = "auto"
    # insecure: NIXL may use plain TCP, and anyone who reaches its port writes the engine's memory
    nixl_tcp: NixlTcp = "off"
    prefill_at: PrefillAt = "auto"  # where prompts are computed; auto: by predicted time
    local_prefill_max_tokens: int = 64  # at most this much missing: prefill where it decodes
    connect_deadline_s: float = 5.0
    heartbeat_interval_s: float = 0.5  # of a source, on the lease's stream
    heartbeat_timeout_s: float = 30.0  # a source whose engine made no step for this long is hung
    pull_deadline_s: float = 30.0  # of one run of blocks; then its blocks are quarantined
    release_deadline_s: float = 5.0
    quarantine_blocks_max: int = 256  # beyond it no new pulls until the agent is made anew
    delay_s: float = 0.0  # for tests: each pull takes this much longer
    overlap: bool = True  # False, to measure: nothing is pulled before all of it is computed
    leases_max: int = 256  # open at one source; beyond it refused
    leases_per_reader_max: int = 128
    pull_bytes_in_flight_max: int = 256 << 20  # of this reader; half of it from one peer
    verify_blocks: VerifyBlocks = "off"  # by checksum on both sides
    leased_blocks_max_share: float = 0.9  # of the pool, finished and not released by their readers

    def __post_init__(self) -> None:
        _check_choice("transport", self.transport, get_args(Transport))
        _check_choice("nixl-tcp", self.nixl_tcp, get_args(NixlTcp))
        _check_choice("prefill-at", self.prefill_at, get_args(PrefillAt))
        _check_choice("verify-blocks", self.verify_blocks, get_args(VerifyBlocks))
        _check_positive("pull_bytes_in_flight_max", self.pull_bytes_in_flight_max)

    @property
    def verify_every(self) -> int:
        """The checksum of each n-th block is compared; 0: of none."""
        return {"off": 0, "sample": 16, "all": 1}[self.verify_blocks]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: an engine process and an I/O process, in one of the two pools."""

    role: Role
    cluster: ClusterConfig
    engine: EngineConfig
    transfer: TransferConfig
    worker_id: str
    host: str = "127.0.0.1"  # the address that peers and routers reach it at
    port: int = 0  # 0: chosen by the system
    metrics_port: int = 0
    drain_deadline_s: float = 30.0
    engine_hang_timeout_s: float = 60.0  # without a turn of its loop while somebody waits
    start_deadline_s: float = 1800.0  # for the engine's model: download, conversion, loading
    cores: tuple[int, ...] = ()  # to pin the engine to; empty: anywhere
    warm_blocks: int = 0  # to adopt from peers after joining; 0: start cold
    generation: str = ""  # beside one that it cannot exchange KV with, while that one drains

    def __post_init__(self) -> None:
        _check_choice("role", self.role, get_args(Role))
        _check_seconds("start_deadline_s", self.start_deadline_s)


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """What the autoscaler is to hold, and within what. `services/tandem/autoscaler` says how."""

    mode: Autoscale = "off"  # dry-run: it explains and exports what it would do
    prefill_min: int = 1
    prefill_max: int = 8
    decode_min: int = 1
    decode_max: int = 8
    ttft_s: float = 2.0  # the service level of a first token
    ttft_token_s: float = 0.0  # more for each token of the prompt
    itl_s: float = 0.1  # of each next token
    cold_start_s: float = 90.0  # from asking for a worker to its first request
    interval_s: float = 10.0  # between two decisions
    history_s: float = 600.0  # of load, that forecasts are drawn from
    load_quantile: float = 0.7  # of ten seconds, that workers are to carry: bursts may queue
    slo_quantile: float = 0.95  # of times, that is to be within the limits
    utilization: float = 0.9  # of a worker's time, at that load
    kv_use_max: float = 0.85  # of a decode worker's KV pool
    down_window_s: float = 600.0  # a pool shrinks to the most that was to be kept in it
    # A smaller pool must be asked less than this share of what it carries. 0.8 shrinks later: fewer
    # changes and misses for 6% more worker-hours (docs/autoscaler.md).
    down_margin: float = 1.0
    down_interval_s: float = 60.0  # between two steps down
    step_down: float = 0.25  # of the pool at once, at least one worker
    reversal_s: float = 600.0  # at most one change of direction in it

    def __post_init__(self) -> None:
        _check_choice("autoscale", self.mode, get_args(Autoscale))
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"{pool}_min"), getattr(self, f"{pool}_max")
            if not 0 <= least <= most:
                raise ConfigError(
                    f"autoscale-{pool}-min is {least} and autoscale-{pool}-max is {most}; "
                    "0 <= min <= max is allowed"
                )
        for name in ("ttft_token_s", "cold_start_s"):
            _check_seconds(f"autoscale_{name}", getattr(self, name))
        for name in ("ttft_s", "itl_s", "interval_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"autoscale-{name[:-2]} is {getattr(self, name)}; it must be seconds above 0"
                )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One replica of the router."""

    cluster: ClusterConfig
    model: str
    served_model_name: str
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    router_id: str = "router-0"
    tokenizer_processes: int = 1
    allowed_hosts: tuple[str, ...] = ()  # of a proxy on this machine: further names of the router
    # Of HTTP: a request's header with its first line, the fields in it, seconds from its first
    # byte (of a connection: from its start) to its end, and from there to the body's end.
    header_bytes_max: int = 64 << 10
    headers_max: int = 100
    header_deadline_s: float = 10.0
    body_deadline_s: float = 60.0
    body_bytes_max: int = 4 << 20
    # Longer than clients keep idle connections, so that they close them and no request meets a
    # close.
    keep_alive_s: float = 75.0
    connections_max: int = 4096  # open at once over HTTP
    # Of a look-up in the prefix tree, the loop's own delay under a burst counted in; then
    # placement goes without.
    lookup_deadline_s: float = 0.02
    hold_requests_max: int = 256  # that wait while a pool is empty; as many for tenants' turns
    hold_deadline_s: float = 30.0
    request_deadline_s: float = 600.0
    drain_deadline_s: float = 30.0  # of live requests, once it is told to stop
    # Refused early: a request whose first token is predicted to come later. 0: none is.
    ttft_limit_s: float = 120.0
    ttft_limit_token_s: float = 0.0  # more for each token of the prompt
    trust_tenant_header: bool = False  # only behind a gateway that sets `x-tandem-tenant` itself
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    # Pool -> RESOURCE/NAME, in this pod's namespace: whose scale is the pool's size on Kubernetes.
    scale_objects: Mapping[str, str] = field(default_factory=dict)
    service_account: str = SERVICE_ACCOUNT  # the folder with its token

    def __post_init__(self) -> None:
        for name in ("body_bytes_max", "hold_requests_max", "tokenizer_processes"):
            _check_positive(name, getattr(self, name))
        for name in ("header_bytes_max", "headers_max", "connections_max"):
            _check_positive(name, getattr(self, name))
        seconds = ("ttft_limit_s", "ttft_limit_token_s", "hold_deadline_s", "drain_deadline_s")
        for name in seconds:
            _check_seconds(name, getattr(self, name))
        for name in ("header_deadline_s", "body_deadline_s", "keep_alive_s"):
            if not 0 < getattr(self, name) < math.inf:
                value = getattr(self, name)
                raise ConfigError(f"{_OPTIONS[name]} is {value:g}; it must be seconds above 0")


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


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise ConfigError(f"{option} is {value}; it must be at least 1")


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:  # written so that NaN fails
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise ConfigError(f"{option} is {value:g}; it must be 0 or a number of seconds")
