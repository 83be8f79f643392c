"""The options of `tandem up`, and the command lines of its processes."""

import ipaddress
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter

from tandem.cluster.gpus import count_gpus
from tandem.cluster.launch.pool_option import Labels, PoolSize, as_mapping, labels_of
from tandem.cluster.pools import ClusterSpec, PoolCommand
from tandem.common.config.admin import AdminOptions
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.autoscale import AutoscaleConfig, AutoscaleMode
from tandem.common.config.cluster import API_KEY_VARIABLE, Pool
from tandem.common.config.engine import EngineOptions
from tandem.common.config.groups import MEASUREMENT, ModelName, ModelRevision, ServedModelName
from tandem.common.config.router import AddressConfig, AdmissionOptions
from tandem.common.config.tls import Kind, PublicTls
from tandem.common.config.transfer import TransferConfig
from tandem.common.options import (
    Bounds,
    Count,
    Options,
    PositiveOrNone,
    Switch,
    Text,
    to_argv,
)
from tandem.errors import ConfigError
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
    served_model_name: Annotated[ServedModelName, Parameter(group=_CLUSTER)] = ""
    num_prefill: Annotated[PoolSize, Parameter(name="--prefill")] = 1
    """Number of prefill workers. 2:gpu=H100 starts 2 on hosts with the label gpu=H100."""
    num_decode: Annotated[PoolSize, Parameter(name="--decode")] = 1
    """Number of decode workers."""
    num_routers: Annotated[PoolSize, Parameter(name="--routers")] = 1
    """Number of routers. With --listen, each router needs a host of its own."""
    workers_per_gpu: PositiveOrNone = None
    """Largest number of workers on one GPU. 0: one worker with --device cuda, no limit with
    --device auto."""
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
    """File with the token that joining machines need. Default: a new token."""
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
    """Largest number of workers in each pool that the autoscaler starts."""
    admin: AdminOptions = field(default_factory=AdminOptions)
    tls: PublicTls = field(default_factory=PublicTls)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    addresses: AddressConfig = field(default_factory=AddressConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
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
        sizes = (self.num_routers, self.num_prefill, self.num_decode)
        if not self.listen and any(labels_of(size) for size in sizes):
            raise ConfigError(
                "--prefill, --decode or --routers has a label, which chooses hosts, so --listen "
                "is needed, too; set --listen, or remove the label"
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
                f"anyone who reaches {outer[0]} could use the cluster, which has no API keys; "
                "set --api-key-file or TANDEM_API_KEY, or give --allow-anonymous"
            )
        # Building the autoscaler's settings raises ConfigError if they are invalid.
        assert self.autoscaler is not None

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
    def gpu_limit(self) -> int | None:
        """Largest number of workers on one GPU; None: no limit."""
        return self.workers_per_gpu or (1 if self.engine.device == "cuda" else None)

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


def check_listen(address: str, option: str = "--listen") -> None:
    """Raises ConfigError unless the option's value is empty or an IP address. A wildcard address
    such as 0.0.0.0 is not allowed."""
    if not address:
        return
    try:
        if ipaddress.ip_address(address).is_unspecified:
            raise ConfigError(
                f"{option} is {address}; it must be a single address at which other machines "
                "reach this one"
            )
    except ValueError:
        raise ConfigError(f"{option} is {address[:80]!r}; it must be an IP address") from None


def check_gpus(options: LaunchOptions, num_gpus: int) -> None:
    """Raises ConfigError if this machine has too few GPUs for the workers. If other machines can
    join, workers wait for GPUs, and this is no error."""
    if options.engine.device == "cuda" and not num_gpus and not options.listen:
        raise ConfigError(
            "--device cuda needs an NVIDIA GPU, and this machine shows none: use --device cpu, or "
            "check the driver, the container's GPUs and CUDA_VISIBLE_DEVICES (`tandem doctor`)"
        )
    limit = options.gpu_limit
    num_workers = options.num_prefill + options.num_decode
    if limit is None or options.engine.device == "cpu" or options.listen or not num_gpus:
        return
    if num_workers > num_gpus * limit:
        raise ConfigError(
            f"{num_workers} workers do not fit on {num_gpus} GPUs with {limit} on each; lower "
            f"--prefill or --decode, or raise --workers-per-gpu to {-(-num_workers // num_gpus)}"
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
    host_id: str = "",
    number: int = 0,
) -> ClusterSpec:
    """Builds the spec of the cluster. `model` is the folder of the model that `options.model`
    names."""
    sizes: dict[Pool, int] = {
        "router": options.num_routers,
        "prefill": options.num_prefill,
        "decode": options.num_decode,
    }
    grpc: dict[Pool, PoolCommand] = {}
    if not options.no_grpc:
        grpc["grpc"] = _router(options, model, run_folder, api="grpc")
    return ClusterSpec(
        cluster_id=cluster_id,
        run_folder=str(run_folder),
        pools={
            "router": _router(options, model, run_folder, api="http"),
            **grpc,
            "prefill": _worker("prefill", options, model, run_folder),
            "decode": _worker("decode", options, model, run_folder),
        },
        wanted={pool: int(size) for pool, size in sizes.items()},
        cores=sorted(os.sched_getaffinity(0)),
        num_gpus=count_gpus(os.environ),
        workers_per_gpu=options.gpu_limit,
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
    options: LaunchOptions, model: Path, run_folder: Path, *, api: Literal["http", "grpc"]
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
    command += to_argv(options.autoscaler)
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


def _worker(role: Pool, options: LaunchOptions, model: Path, run_folder: Path) -> PoolCommand:
    command = [sys.executable, "-m", "tandem.worker", "--role", role, "--worker-id", "{id}"]
    command += ["--model", str(model), "--cores", "{cores}"]
    if options.listen:
        command += ["--host", options.listen]
    command += _tls(options, run_folder, "worker")
    command += [*to_argv(options.transfer), *to_argv(options.engine)]
    num_cores = options.engine.num_threads * options.engine.tensor_parallel
    return PoolCommand(command, num_cores=num_cores, device=options.engine.device)
