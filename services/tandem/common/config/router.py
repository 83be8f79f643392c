"""Settings of `tandem router`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from cyclopts import Parameter

from tandem.common.config.admin import AdminOptions
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.config.cluster import SIZED_POOLS, ClusterConfig
from tandem.common.config.files import FileOptions
from tandem.common.config.gateway import GatewayOptions
from tandem.common.config.groups import (
    HTTP,
    REQUESTS,
    ModelImpl,
    ModelName,
    ModelRevision,
    Own,
    ServedModelName,
)
from tandem.common.config.more_models import check_groups, names_of, settings_of, split_models
from tandem.common.config.tls import PublicTls, TlsDir
from tandem.common.options import (
    Constant,
    Count,
    Name,
    Options,
    Port,
    Positive,
    PositiveSeconds,
    PositiveSize,
    Seconds,
    Size,
    Switch,
    Text,
    by_comma,
    extended,
)
from tandem.errors import ConfigError

_Http = Parameter(group=HTTP)
# Folder with the credentials of a pod's service account.
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+")
_SCALE_OBJECT = re.compile(r"(\w+)=((?:statefulsets|deployments)/[a-z0-9]([-a-z0-9.]*[a-z0-9])?)")


def _parse_proxies(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(" ", "").split(",")))


@Parameter(name="*", group=HTTP)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddressConfig(Options):
    """Limits for each client address, over HTTP and gRPC."""

    trusted_proxies: Annotated[tuple[str, ...], by_comma("CIDR,...", _parse_proxies)] = ()
    """CIDR networks of the proxies that may send X-Forwarded-For. The router ignores this header in
    requests of other senders."""
    connections_per_address: Count = 0
    """Largest number of connections of one client address. 0: half of --connections-max.
    Addresses in --trusted-proxies have no limit."""
    requests_per_address: Count = 0
    """Largest number of unanswered requests of one client address. 0: half of --connections-max."""

    unparsed_bytes_per_address: Size = 0
    """Part of --unparsed-bytes-max that one client address may use, in bytes. 0: half of
    --unparsed-bytes-max."""

    def check_together(self) -> None:
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"trusted-proxies has {proxy!r}; it must be an address or a network such as "
                    f"10.0.0.0/8: {error}"
                ) from None


def parse_scale_objects(text: str) -> dict[str, str]:
    """Parses POOL=RESOURCE/NAME,... such as prefill=statefulsets/NAME. Raises ConfigError."""
    found: dict[str, str] = {}
    for entry in filter(None, text.split(",")):
        match = _SCALE_OBJECT.fullmatch(entry)
        if match is None or match[1] not in SIZED_POOLS or match[1] in found:
            raise ConfigError(
                f"scale-objects has the entry {entry!r}; an entry must be POOL=statefulsets/NAME "
                f"or POOL=deployments/NAME. Each POOL may occur once, and must be one of "
                f"{', '.join(SIZED_POOLS)}"
            )
        found[match[1]] = match[2]
    return found


def _parse_hosts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.lower().split(",")))


def _parse_origins(text: str) -> tuple[str, ...]:
    origins = tuple(filter(None, text.split(",")))
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors-origins has {origin!r}; it must be * or an origin such as "
                "https://app.example:8443"
            )
    return origins


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@Parameter(name="*", group=REQUESTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionOptions(Options):
    """The options of a router that say which requests it refuses or delays."""

    ttft_limit_s: Seconds = 120.0
    """Longest predicted time to the first token of a request, in seconds. Requests with a
    longer predicted time are refused (429). 0: no limit."""
    ttft_limit_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to --ttft-limit."""
    model_aliases: Annotated[tuple[str, ...], by_comma("NAME,...", _parse_names)] = ()
    """Further names of the served model in requests. * stands for any characters, such as in
    claude-*."""
    varying_lines: Literal["keep", "move"] = "keep"
    """move: lines with the date or the time in a system prompt move to the user's first message, so
    that the KV of the rest is reused on other days. keep: prompts stay as they are."""
    strict_fields: Switch = False
    """Refuse requests with unknown fields. Without this option, unknown fields are ignored, and the
    response header `warning` names them."""
    ollama_api: Annotated[Switch, _Http] = False
    """Serve a part of Ollama's API, too, such as /api/chat."""
    score_template: Text = "auto"
    """Prompt of a query and a document in /v1/rerank and /v1/score. auto: that of Qwen3-Reranker if
    the name of the model has qwen3-reranker. none: the two texts as the tokenizer joins them.
    qwen3-reranker, or the path of a text file with {query} and {document}: this template. A model
    without a head for scores then answers yes or no."""
    responses_kept: Count = 256
    """Number of answers of /v1/responses that a cluster keeps. 0: none."""
    kv_budgets: Literal["allow", "refuse"] = "allow"
    """allow: a request may limit its KV with the field `kv_budget`. refuse: requests with this
    field are refused."""
    logprobs_max: Positive = 500_000
    """Largest number of log probabilities in one answer."""
    cors_origins: Annotated[tuple[str, ...], _Http, by_comma("ORIGIN,...", _parse_origins)] = ()
    """Web origins that may call the API from browsers, such as https://app.example. *: all."""
    trust_tenant_header: Switch = False
    """Take the tenant of a request from its header x-tandem-tenant. Use this option only behind a
    gateway that sets this header."""
    allow_anonymous: Annotated[Switch, Own] = False
    """Serve requests without an API key also at addresses that other machines reach, as long as the
    router has no API keys."""
    keys_file: Annotated[Text, Own] = ""
    """JSON file with API keys, such as a mounted Secret, in addition to the keys in Redis."""
    grpc_memory: PositiveSize = 1 << 30
    """Largest growth of the memory of the process that serves only gRPC, or of an endpoint picker,
    after the model is loaded. Beyond this limit, the process drains and ends, and `tandem up`,
    Kubernetes or Compose starts it again."""
    keys_max_age_s: Seconds = 0.0
    """Refuse requests with API keys if the router could not read the keys from Redis for this many
    seconds. 0: never."""


@Parameter(name="*", group=REQUESTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(AdmissionOptions):
    """`tandem router` runs one replica of the router. Its secrets come from the environment."""

    model: ModelName
    model_revision: ModelRevision = ""
    model_impl: ModelImpl = "auto"
    served_model_name: ServedModelName = ""
    more_models: Annotated[Text, Own] = ""
    """Further models that this router serves, with their own options: "PATH group=NAME; ...". Each
    has the pools whose workers have the same --group."""
    group: Annotated[Name, Own] = ""
    """Group of pools that computes the model. Default: that of the first model of the cluster."""
    host: Annotated[str, Own] = "127.0.0.1"
    """Address on which the HTTP and gRPC APIs listen."""
    api: Annotated[Literal["both", "http", "grpc"], Own] = "both"
    """Public APIs that this process serves. both: HTTP and gRPC. grpc: only gRPC, with the memory
    limit of --grpc-memory."""
    http_port: Annotated[Port, Own] = 8000
    """Port of the HTTP API. With --api grpc, this port serves only probes and other routers."""
    grpc_port: Annotated[Port, Own] = 8001
    """Port of the gRPC API."""
    router_id: Annotated[str, Own] = "router-0"
    """Name of the router."""
    tls_dir: TlsDir = ""
    tls: PublicTls = field(default_factory=PublicTls)
    # Pool -> Kubernetes object in this pod's namespace, such as statefulsets/NAME. The number of
    # replicas of the object is the size of the pool.
    scale_objects: Annotated[
        Mapping[str, str],
        Own,
        by_comma("POOL=RESOURCE/NAME,...", parse_scale_objects),
    ] = field(default_factory=dict)
    """Kubernetes objects that run the pools, such as prefill=statefulsets/NAME. To size a pool, the
    router sets the number of replicas of the pool's object. Default: the pool controller sizes the
    pools."""
    tokenizer_processes: Positive = 1
    """Number of processes that render and tokenize prompts."""
    lookup_deadline_s: Seconds = 0.02
    """Longest wait for the prefix tree in Redis, in seconds. After this time, the router chooses
    workers without regard to cached prompts. Raise the limit for a distant Redis."""
    prefix_replica_memory: Size = 256 << 20
    """Largest memory for the router's replica of the prefix tree, such as 1GiB. One million blocks
    take 23 to 38 MB. If the tree is larger, the router looks prompts up in Redis. 0: always."""
    hold_deadline_s: Seconds = 30.0
    """Longest wait of a request for a ready decode worker, in seconds. Set a longer time than a
    worker takes to start."""
    drain_deadline_s: Seconds = 30.0
    """Time in seconds that a stopping router gives its running requests to finish. The router then
    ends the rest."""
    header_bytes_max: Annotated[PositiveSize, _Http] = 64 << 10
    """Largest request header, in bytes."""
    headers_max: Annotated[Positive, _Http] = 100
    """Largest number of fields in a request header."""
    header_deadline_s: Annotated[PositiveSeconds, _Http] = 10.0
    """Longest time to receive a request header, in seconds."""
    body_deadline_s: Annotated[PositiveSeconds, _Http] = 60.0
    """Longest time to receive a request body, in seconds."""
    keep_alive_s: Annotated[PositiveSeconds, _Http] = 75.0
    """Idle connections are closed after this many seconds. Clients should close them earlier."""
    send_deadline_s: Annotated[PositiveSeconds, _Http] = 60.0
    """A connection whose client reads nothing for this many seconds is closed."""
    connections_max: Annotated[Positive, _Http] = 4096
    """Largest number of open connections."""
    unparsed_bytes_max: Annotated[PositiveSize, _Http] = 256 << 20
    """Largest total size of request bodies that wait to be parsed, in bytes."""
    allowed_hosts: Annotated[tuple[str, ...], _Http, by_comma("NAME,...", _parse_hosts)] = ()
    """Further names that a router on 127.0.0.1 accepts in the header Host, such as the host name of
    a proxy."""
    addresses: AddressConfig = field(default_factory=AddressConfig)
    admin: AdminOptions = field(default_factory=AdminOptions)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    files: FileOptions = field(default_factory=FileOptions)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    body_bytes_max: Constant[Positive] = 4 << 20
    # Largest number of requests that wait because a pool has no worker. The same number limits the
    # requests that wait for their tenant's turn.
    hold_requests_max: Constant[Positive] = 256
    request_deadline_s: Constant[float] = 600.0
    service_account: Constant[str] = SERVICE_ACCOUNT  # folder with the service account's token

    def check_together(self) -> None:
        if self.api != "both" and self.gateway.endpoint_picker:
            raise ConfigError(
                f"--api {self.api} and --endpoint-picker cannot both be set: an endpoint picker "
                "has no public API"
            )
        if self.api == "grpc" and self.gateway.front_of:
            raise ConfigError(
                "--front-of needs the HTTP API, but --api is grpc; set --api to http or both, or "
                "remove --front-of"
            )
        of_address = self.addresses.unparsed_bytes_per_address or self.unparsed_bytes_max // 2
        if (room := min(of_address, self.unparsed_bytes_max)) < (body := self.body_bytes_max):
            raise ConfigError(
                f"the limit of unparsed bytes for each client address is {room}, less than the "
                f"largest request body of {body} bytes; set unparsed-bytes-per-address to at least "
                f"{body} and unparsed-bytes-max to at least {2 * body}"
            )

    @property
    def has_leaking_port(self) -> bool:
        """True if clients reach this process only over gRPC.

        The gRPC library never frees the tables of some compressed headers (HPACK), so the memory of
        such a process grows until it must restart.
        """
        return self.api == "grpc" or bool(self.gateway.endpoint_picker)

    @property
    def connections_per_address_max(self) -> int:
        """Largest number of connections of one address. It is half of `connections_max` unless the
        option is set."""
        return self.addresses.connections_per_address or max(1, self.connections_max // 2)

    @property
    def requests_per_address_max(self) -> int:
        """Largest number of unanswered requests of one address. It is half of `connections_max`
        unless the option is set."""
        return self.addresses.requests_per_address or max(1, self.connections_max // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterOptions):
    """The settings of one replica of the router."""

    cluster: Constant[ClusterConfig]

    def further(self) -> list[RouterConfig]:
        """Returns the settings of the further models. Raises ConfigError."""
        base = RouterOptions(**{f.name: getattr(self, f.name) for f in fields(RouterOptions)})
        found = [
            settings_of(base, RouterOptions, entry, own=_OF_MODEL, reset=_OF_ONE_MODEL)
            for entry in split_models(self.more_models)
        ]
        check_groups(self.group, [each.group for each in found])
        return [extended(each, RouterConfig, cluster=self.cluster) for each in found]


# Options that describe one model, so that the value of the first model suits no other one.
_OF_ONE_MODEL = names_of(AnswerConfig, AutoscaleConfig) | {
    *("--group", "--model-revision", "--served-model-name", "--model-aliases", "--score-template"),
    "--scale-objects",
}
# The options that each model of a router may have for itself. Those that are not above have the
# router's value unless the entry sets them.
_OF_MODEL = _OF_ONE_MODEL | {
    *("--model-impl", "--varying-lines", "--kv-budgets", "--ttft-limit", "--ttft-limit-token"),
    "--hold-deadline",
}
