"""The options of `tandem up`, and the command lines of its processes."""

import ipaddress
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter

from tandem.cluster.gpu_check import Cards, Driver, why_unusable
from tandem.cluster.gpus import count_gpus
from tandem.cluster.launch.pool_option import Labels, PoolSize, as_mapping, labels_of
from tandem.cluster.pools import ClusterSpec, PoolCommand
from tandem.common.config.admin import AdminOptions
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.autoscale import AutoscaleConfig, AutoscaleMode
from tandem.common.config.cluster import API_KEY_VARIABLE, Pool, PoolName, pool_name
from tandem.common.config.engine import EngineOptions
from tandem.common.config.files import FileOptions
from tandem.common.config.groups import (
    MEASUREMENT,
    ModelImpl,
    ModelName,
    ModelRevision,
    ServedModelName,
)
from tandem.common.config.more_models import (
    OPTION,
    as_words,
    check_groups,
    group_name,
    join_models,
    names_of,
    settings_of,
    split_models,
)
from tandem.common.config.router import AddressConfig, AdmissionOptions
from tandem.common.config.tls import Kind, PublicTls
from tandem.common.config.transfer import TransferConfig
from tandem.common.dtypes import compute_dtype
from tandem.common.options import (
    Bounds,
    Count,
    Options,
    PositiveOrNone,
    Switch,
    Text,
    to_argv,
)
from tandem.common.process.numa import by_node
from tandem.engine.memory import worker_need
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.net.security.access import is_loopback

NUM_CLUSTER_PORTS = 220
_GRPC_PORTS = 10  # offset of the gRPC replica's HTTP and admin ports from the first cluster port
LOCAL_COLD_START_S = 15.0  # expected time to start a worker whose model is on this machine
_CLUSTER = Group("Cluster", sort_key=1)

_ClusterPort = Annotated[int, Bounds(least=1024, most=65535 - NUM_CLUSTER_PORTS)]
_PublicPort = Annotated[int, Bounds(least=1, most=65535)]


@Parameter(name="*", group=_CLUSTER)
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(Options):
    """`tandem up` starts a whole cluster on this machine; Ctrl-C stops all of it."""

    USAGE: ClassVar[str] = "Usage: tandem up [MODEL] [OPTIONS]"
    SHORT_HELP: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Model": ("--model", "--served-model-name", "--lora", "--max-model-len"),
        "Workers": ("--prefill", "--decode", "--autoscale", "--device", "--threads", "--listen"),
        "Speed and memory": (
            "--dtype",
            "--kv-memory",
            "--kv-dtype",
            "--kv-host-memory",
            "--max-num-seqs",
        ),
        "Access": ("--host", "--port", "--admin-port", "--api-key-file"),
        "Options": ("--config",),
    }

    model: Annotated[ModelName, Parameter(group=_CLUSTER)] = "smollm2"
    model_revision: Annotated[ModelRevision, Parameter(group=_CLUSTER)] = ""
    model_impl: Annotated[ModelImpl, Parameter(group=_CLUSTER)] = "auto"
    served_model_name: Annotated[ServedModelName, Parameter(group=_CLUSTER)] = ""
    more_models: Text = ""
    """Further models, each with pools of its own. Options after a model are its own:
    "qwen2.5-0.5b decode=2; ./my-model". A second --model does the same."""
    num_prefill: Annotated[PoolSize, Parameter(name="--prefill")] = 1
    """Number of prefill workers. 2:gpu=H100 starts 2 on hosts with the label gpu=H100."""
    num_decode: Annotated[PoolSize, Parameter(name="--decode")] = 1
    """Number of decode workers."""
    num_encode: Annotated[PoolSize, Parameter(name="--encode")] = 0
    """Number of encode workers, which compute the images of prompts. 0: the workers that compute
    the prompts also compute their images."""
    num_routers: Annotated[PoolSize, Parameter(name="--routers")] = 1
    """Number of routers. With --listen, each router needs a host of its own."""
    workers_per_gpu: PositiveOrNone = None
    """Largest number of workers on one GPU. 0 with --device cuda: two if this machine has only one
    GPU and --listen is not set, else one. 0 with another --device: no limit."""
    host: str = "127.0.0.1"
    """Address on which the HTTP and gRPC APIs listen."""
    http_port: Annotated[_PublicPort, Parameter(name="--port")] = 8000
    """Port of the HTTP API."""
    grpc_port: _PublicPort = 8001
    """Port of the gRPC API."""
    no_grpc: Switch = False
    """Do not start the gRPC API."""
    api_key_file: Text = ""
    """File with a key that every request needs. Default: the key in TANDEM_API_KEY."""
    redis_url: Annotated[Text, Parameter(name="--redis")] = ""
    """URL of an existing Redis. Default: the cluster starts its own."""
    listen: Annotated[Text, Parameter(metavar="IP")] = ""
    """IP address of this machine at which other machines join this cluster. Default: other machines
    cannot join."""
    cluster_port: _ClusterPort = 8100
    """With --listen: the first of 220 ports for joining machines, Ray and Redis."""
    join_token_file: Text = ""
    """With --listen: file with the token that other machines need to join. Default: `tandem up`
    writes a new token to a file, and prints a `tandem join` command with the path of the file."""
    labels: Labels = ()
    """Labels of this machine, such as gpu=H100. --prefill 2:gpu=H100 starts prefill workers only on
    machines with this label."""
    no_cluster_tls: Annotated[Switch, Parameter(group=MEASUREMENT)] = False
    """Do not encrypt calls between routers and workers. Only for measurements."""
    parent_pid: Annotated[PositiveOrNone, Parameter(name="--die-with-parent", metavar="PID")] = None
    """Stop the cluster when the process with this id ends. 0: off."""
    autoscale: AutoscaleMode = "off"
    autoscale_min: Count = 1
    """Smallest number of workers in each pool. 0: idle pools stop until the next request."""
    autoscale_max: Count = 4
    """The autoscaler grows each pool to at most this many workers."""
    admin: AdminOptions = field(default_factory=AdminOptions)
    tls: PublicTls = field(default_factory=PublicTls)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    addresses: AddressConfig = field(default_factory=AddressConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    files: FileOptions = field(default_factory=FileOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transfer: TransferConfig = field(default_factory=TransferConfig)

    def check_together(self) -> None:
        named: dict[int, str] = {}
        for option, (_, port) in self.ports.items():
            if not port:
                raise ConfigError(f"{option} is 0; it must be from 1 to 65535")
            if named.setdefault(port, option) != option:
                raise ConfigError(f"{named[port]} and {option} are both {port}; they must differ")
        check_listen(self.listen)
        sizes = (self.num_routers, self.num_prefill, self.num_decode, self.num_encode)
        if not self.listen and any(labels_of(size) for size in sizes):
            raise ConfigError(
                "a label in --prefill, --decode, --encode or --routers needs --listen, because "
                "without --listen no other machine can join; set --listen, or remove the label"
            )
        if self.listen and self.no_cluster_tls:
            raise ConfigError(
                "--no-cluster-tls and --listen cannot be given together: calls between machines "
                "must be encrypted"
            )
        if self.api_key_file and self.admission.keys_file:
            raise ConfigError("--api-key-file and --keys-file cannot be given together")
        # A new Redis has no API keys. An existing one may have some, which is not checked here.
        places = (self.api_key_file, self.admission.keys_file, self.redis_url)
        has_keys = any(places) or bool(os.environ.get(API_KEY_VARIABLE))
        outer = [host for host in (self.host, self.admin.host) if not is_loopback(host)]
        if outer and not (has_keys or self.admission.allow_anonymous):
            raise ConfigError(
                f"the cluster has no API keys, so anyone could use the cluster at {outer[0]}; "
                "set --api-key-file or TANDEM_API_KEY, or give --allow-anonymous"
            )
        # Building the autoscaler's settings raises ConfigError if they are invalid.
        assert self.autoscaler is not None
        if self.listen and self.more_models:
            raise ConfigError(
                "--listen and several models cannot be given together; start a cluster for each "
                "model, or leave --listen out"
            )
        check_groups(self.group, [each.group for each in self.further()])

    def further(self) -> list["LaunchOptions"]:
        """Returns the options of the further models. Raises ConfigError."""
        own = _OF_MODEL | _OF_ONE_MODEL
        return [
            settings_of(self, LaunchOptions, entry, own=own, reset=_OF_ONE_MODEL)
            for entry in split_models(self.more_models)
        ]

    @property
    def group(self) -> str:
        """Name of the pools of this model, if it is a further one."""
        return group_name(self.served_model_name or self.model)

    @property
    def num_workers(self) -> int:
        """Number of workers of all roles and models."""
        own = self.num_prefill + self.num_decode + self.num_encode
        return own + sum(each.num_workers for each in self.further())

    @property
    def autoscaler(self) -> AutoscaleConfig:
        """The autoscaler's settings for a router on this machine."""
        return AutoscaleConfig(
            mode=self.autoscale,
            prefill_min=self.autoscale_min,
            decode_min=self.autoscale_min,
            prefill_max=self.autoscale_max,
            decode_max=self.autoscale_max,
            cold_start_s=LOCAL_COLD_START_S,
        )

    @property
    def gpus_per_worker(self) -> int:
        """Number of GPUs that a worker uses, if it uses any: one for each rank."""
        return 1 if self.engine.ranks_share_gpu else self.engine.tensor_parallel

    def gpu_limit(self, num_gpus: int) -> int | None:
        """Largest number of workers on one GPU of a machine with `num_gpus`; None: no limit."""
        if self.workers_per_gpu or self.engine.device != "cuda":
            return self.workers_per_gpu
        return 2 if num_gpus // self.gpus_per_worker == 1 and not self.listen else 1

    def workers_on_gpu(self, num_gpus: int) -> int:
        """Number of workers that share one of a machine's GPUs, at most; 1 without GPUs. The
        autoscaler may start more workers later, and they count, too."""
        if not num_gpus:
            return 1
        models = [each for each in (self, *self.further()) if each.engine.device != "cpu"]
        # A worker takes one of the places that groups of GPUs of its size are.
        taken = sum(
            Fraction(each.num_workers_max, max(1, num_gpus // each.gpus_per_worker))
            for each in models
        )
        shared = max(1, math.ceil(taken))
        return min(shared, self.gpu_limit(num_gpus) or shared)

    @property
    def num_workers_max(self) -> int:
        """Largest number of workers of this model that run at once."""
        num_workers = self.num_prefill + self.num_decode
        if self.autoscale == "on":
            num_workers = max(num_workers, 2 * self.autoscale_max)
        return num_workers + self.num_encode

    def engine_on(self, num_gpus: int, num_shared: int | None = None) -> EngineOptions:
        """The engine's options for a worker on a machine with `num_gpus`: it gets its part of the
        memory of the GPU that it shares with `num_shared` workers, by default `workers_on_gpu`."""
        num_shared = num_shared or self.workers_on_gpu(num_gpus)
        if num_shared == 1:
            return self.engine
        # Rounded down to 4 digits, so that the parts are not more than the whole.
        part = int(self.engine.gpu_memory_utilization / num_shared * 1e4) / 1e4
        return replace(self.engine, gpu_memory_utilization=max(1e-4, part))

    @property
    def ports(self) -> dict[str, tuple[str, int]]:
        """Host and port of each listener. The keys are the options that set the ports."""
        grpc = {} if self.no_grpc else {"--grpc-port": (self.host, self.grpc_port)}
        return {
            "--port": (self.host, self.http_port),
            **grpc,
            "--admin-port": (self.admin.host, self.admin.port),
            "--admin-grpc-port": (self.admin.host, self.admin.grpc_port),
        }

    @property
    def http_url(self) -> str:
        scheme = "https" if self.tls.tls_cert else "http"
        return f"{scheme}://{_reachable(self.host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{_reachable(self.host)}:{self.grpc_port}"

    @property
    def admin_url(self) -> str:
        # As in a router, admin ports on loopback use plain text.
        scheme = "https" if self.tls.tls_cert and not is_loopback(self.admin.host) else "http"
        return f"{scheme}://{_reachable(self.admin.host)}:{self.admin.port}"

    @property
    def admin_grpc_address(self) -> str:
        return f"{_reachable(self.admin.host)}:{self.admin.grpc_port}"


# Options of `tandem up` that each further model may set for itself. Without an entry, it has the
# value that holds for all models.
_OF_MODEL = names_of(EngineOptions, TransferConfig) | {
    *("--model-impl", "--prefill", "--decode", "--encode"),
    *("--autoscale", "--autoscale-min", "--autoscale-max"),
    *("--varying-lines", "--kv-budgets", "--ttft-limit", "--ttft-limit-token"),
}
# The same, but they describe one model, so that the value of the first model suits no other one.
_OF_ONE_MODEL = names_of(AnswerConfig) | {
    *("--model-revision", "--served-model-name", "--model-aliases", "--score-template"),
    *("--lora", "--max-model-len", "--speculative-config", "--num-blocks"),
}
# Options of AdmissionOptions that a router has once for all models.
_OF_ROUTER = names_of(AdmissionOptions) - _OF_MODEL - _OF_ONE_MODEL


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model of the cluster beside the first one."""

    options: LaunchOptions
    folder: ModelFolder
    name: str  # name of the model in the API

    @property
    def group(self) -> str:
        return self.options.group

    @property
    def entry(self) -> list[str]:
        """The model's entry in `--more-models` of a router."""
        options = self.options
        argv = ["--group", self.group, "--served-model-name", self.name]
        # Otherwise a router would give the further model the first one's values.
        argv += to_argv(options.admission, without=_OF_ROUTER, with_defaults=True)
        argv += [*to_argv(options.answers), *to_argv(options.autoscaler)]
        return [str(self.folder.path), *as_words(argv)]


def check_listen(address: str, option: str = "--listen") -> None:
    """Raises ConfigError unless the option's value is empty or an IP address. A wildcard address
    such as 0.0.0.0 is not allowed."""
    if not address:
        return
    try:
        if ipaddress.ip_address(address).is_unspecified:
            raise ConfigError(
                f"{option} is {address}; give a single IP address of this machine that other "
                "machines can reach"
            )
    except ValueError:
        raise ConfigError(f"{option} must be an IP address, not {address[:80]!r}") from None


def check_gpus(options: LaunchOptions, num_gpus: int, driver: Driver | None, cards: Cards) -> None:
    """Raises ConfigError if this machine's GPUs cannot be used, or are too few for the workers. If
    other machines can join, workers wait for GPUs, and a machine without any is no error."""
    if options.engine.device == "cpu" or (options.listen and not num_gpus):
        return
    if options.engine.device == "cuda":
        if not num_gpus:
            raise ConfigError(
                "--device cuda needs an NVIDIA GPU, but no GPU was found on this machine. Use "
                "--device cpu, or check the driver, the container's GPUs and CUDA_VISIBLE_DEVICES "
                "(`tandem doctor`)"
            )
        if unusable := why_unusable(driver):
            here = f", and this machine has {driver}" if driver else ""
            raise ConfigError(
                f"--device cuda cannot be used: {unusable.why}{here}; {unusable.remedy}, or use "
                "--device cpu"
            )
        if cards.fault:
            raise ConfigError(
                f"--device cuda cannot be used: {cards.fault}; check the driver with `tandem "
                "doctor` and `nvidia-smi`, or use --device cpu"
            )
    if options.listen:
        return
    limit = options.gpu_limit(num_gpus)
    num_workers = options.num_workers
    needed = options.gpus_per_worker
    places = num_gpus // needed  # for workers that share no GPU
    has = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    if options.engine.device == "cuda" and not places:
        raise ConfigError(
            f"--tensor-parallel {needed} needs {needed} GPUs for each worker, but this machine has "
            f"{has}; lower --tensor-parallel, or use --device cpu"
        )
    if limit is not None and places and num_workers > places * limit:
        each = "" if needed == 1 else f" with {needed} GPUs each"
        raise ConfigError(
            f"{num_workers} workers{each} do not fit on {has} (at most {limit} on one GPU). Lower "
            "--prefill or --decode, or let workers share a GPU's memory with --workers-per-gpu "
            f"{-(-num_workers // places)}"
        )


def check_gpu_memory(
    options: LaunchOptions,
    model: ModelFolder | None,
    cards: Cards,
    num_shared: int | None = None,
) -> None:
    """Raises ConfigError if a worker's part of a GPU is too small for the weights, or for the
    weights and a KV pool of a given size. Other programs on the GPU, steps and graphs are not
    counted: each worker measures them. Does nothing if the GPUs' memory is unknown. `num_shared`
    workers share a GPU, by default `workers_on_gpu`."""
    if not cards.total_bytes or options.engine.device == "cpu":
        return
    num_gpus = len(cards.total_bytes)
    total = min(cards.total_bytes)
    num_shared = num_shared or options.workers_on_gpu(num_gpus)
    engine = replace(options.engine_on(num_gpus, num_shared), kv_host_bytes=0)
    dtype = compute_dtype(engine, has_bfloat16=True)
    kernels = "triton" if engine.kernels == "auto" else engine.kernels
    need = worker_need(engine, model, dtype=dtype, kernels=kernels)
    workers = "a worker" if num_shared == 1 else f"each of {num_shared} workers"
    fewer = "" if num_shared == 1 else ", start fewer workers on a GPU (--prefill, --decode)"
    smaller = f"choose a smaller or a quantized model{fewer}, or use --device cpu"
    weights = f"{need.weights_bytes:,} bytes of weights"
    if engine.has_default_pool:
        may_use = int(engine.gpu_memory_utilization * total)
        if need.weights_bytes < may_use:
            return
        raise ConfigError(
            f"{weights} do not fit: {workers} may use {may_use:,} of a GPU's {total:,} bytes "
            f"(--gpu-memory-utilization {options.engine.gpu_memory_utilization:g}); {smaller}"
        )
    if num_shared * (need.weights_bytes + need.pool_bytes) < total:
        return
    raise ConfigError(
        f"{need.option} does not fit on a GPU of {total:,} bytes: {workers} needs "
        f"{need.pool_bytes:,} bytes for the KV pool and {weights}; lower "
        f"{need.option.split()[0]}, {smaller}"
    )


def options_for_others(options: LaunchOptions) -> list[str]:
    """Builds the command line that machines get when they join. It lacks the options that apply
    only to this machine. It still has this machine's address, which `on_host` replaces."""
    own = replace(options, parent_pid=None, join_token_file="", labels=())
    return to_argv(own)


def on_host(
    options: LaunchOptions, *, first: str, address: str, labels: tuple[str, ...]
) -> LaunchOptions:
    """Adapts the options of `tandem up` to a machine that joins. `first` is the IP address of the
    machine of `tandem up`, `address` that of the joining machine."""
    host = address if options.host == first else options.host
    admin = replace(
        options.admin, host=address if options.admin.host == first else options.admin.host
    )
    return replace(options, listen=address, host=host, admin=admin, labels=labels)


def make_spec(
    options: LaunchOptions,
    *,
    cluster_id: str,
    run_folder: Path,
    model: Path,
    more: Sequence[FurtherModel] = (),
    host_id: str = "",
    number: int = 0,
) -> ClusterSpec:
    """Builds the spec of the cluster. `model` is the folder of the model that `options.model`
    names, and `more` has the further models."""
    num_gpus = count_gpus(os.environ)
    num_shared = options.workers_on_gpu(num_gpus)
    sizes: dict[PoolName, int] = {"router": options.num_routers}
    pools: dict[PoolName, PoolCommand] = {
        "router": _router(options, model, run_folder, more, api="http")
    }
    if not options.no_grpc:
        pools["grpc"] = _router(options, model, run_folder, more, api="grpc")
    for group, own, folder in [
        ("", options, model),
        *((m.group, m.options, m.folder.path) for m in more),
    ]:
        wanted: dict[Pool, int] = {"prefill": own.num_prefill, "decode": own.num_decode}
        if own.num_encode:
            wanted["encode"] = own.num_encode
        engine = own.engine_on(num_gpus, num_shared)
        for role, size in wanted.items():
            pool = pool_name(group, role)
            sizes[pool] = size
            pools[pool] = _worker(role, group, own, engine, folder, run_folder)
    nodes = by_node(os.sched_getaffinity(0))
    return ClusterSpec(
        cluster_id=cluster_id,
        run_folder=str(run_folder),
        pools=pools,
        wanted={pool: int(size) for pool, size in sizes.items()},
        cores=[core for node in nodes for core in node],
        numa=[len(node) for node in nodes],
        num_gpus=num_gpus,
        workers_per_gpu=options.gpu_limit(num_gpus),
        host_id=host_id,
        number=number,
        labels=as_mapping(options.labels),
        selectors={pool: as_mapping(labels_of(size)) for pool, size in sizes.items()},
    )


def certificate_folder(run_folder: Path, kind: Kind) -> Path:
    """Returns the folder with the certificate of this machine's processes of one kind."""
    return run_folder / "tls" / kind


def _reachable(host: str) -> str:
    """Converts a bind address to one that a client on this machine can use in a URL: 0.0.0.0
    becomes 127.0.0.1."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _tls(options: LaunchOptions, run_folder: Path, kind: Kind) -> list[str]:
    if options.no_cluster_tls:
        return []
    return ["--tls-dir", str(certificate_folder(run_folder, kind))]


def _router(
    options: LaunchOptions,
    model: Path,
    run_folder: Path,
    more: Sequence[FurtherModel],
    *,
    api: Literal["http", "grpc"],
) -> PoolCommand:
    command = [sys.executable, "-m", "tandem.router", "--model", str(model)]
    if options.served_model_name:
        command += ["--served-model-name", options.served_model_name]
    command += ["--router-id", "{id}", "--host", options.host, "--api", api]
    command += ["--http-port", "{http_port}"]
    command += ["--grpc-port", "{grpc_port}"] if api == "grpc" else []
    command += ["--admin-host", options.admin.host]
    command += ["--admin-port", "{admin_port}", "--admin-grpc-port", "{admin_grpc_port}"]
    command += [*_tls(options, run_folder, "router"), *to_argv(options.tls)]
    command += [*to_argv(options.admission), *to_argv(options.addresses)]
    command += to_argv(options.answers)
    command += to_argv(options.files) if api == "http" else []
    command += to_argv(options.autoscaler)
    if more:
        command += [OPTION, join_models(each.entry for each in more)]
    if api == "http":
        ports = {
            "http_port": options.http_port,
            "admin_port": options.admin.port,
            "admin_grpc_port": options.admin.grpc_port,
        }
    else:
        # With several machines, other machines' routers call this replica's HTTP ports, which must
        # be fixed then. On one machine the system chooses the ports.
        names = ("http_port", "admin_port", "admin_grpc_port")
        first = options.cluster_port + _GRPC_PORTS if options.listen else 0
        ports = {name: first and first + n for n, name in enumerate(names)}
        ports["grpc_port"] = options.grpc_port
    return PoolCommand(command, ports=ports)


def _worker(
    role: Pool,
    group: str,
    options: LaunchOptions,
    engine: EngineOptions,
    model: Path,
    run_folder: Path,
) -> PoolCommand:
    command = [sys.executable, "-m", "tandem.worker", "--role", role, "--worker-id", "{id}"]
    command += ["--model", str(model), "--cores", "{cores}"]
    if group:
        command += ["--group", group]
    if options.listen:
        command += ["--host", options.listen]
    command += _tls(options, run_folder, "worker")
    command += [*to_argv(options.transfer), *to_argv(engine)]
    num_cores = engine.num_threads * engine.tensor_parallel
    return PoolCommand(
        command, num_cores=num_cores, device=engine.device, num_gpus=options.gpus_per_worker
    )
