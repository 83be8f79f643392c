"""Parses a Redis URL: one server, a service that Sentinels watch, or a Redis Cluster.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]                         one server
    unix://[[USER]:PASSWORD@]PATH[?db=DB]                              one server, by its socket
    redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],.../SERVICE[/DB]    the master of SERVICE
    redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],...                  any nodes of a cluster

`rediss` instead of `redis` uses TLS with every server, including the Sentinels. Options of
redis-py's connections follow after `?`. Examples are ssl_ca_certs, ssl_certfile, ssl_keyfile
(paths), ssl_cert_reqs (required, optional, none) and ssl_check_hostname. For Sentinels there are
also sentinel_username and sentinel_password. Special characters in a user name or password are
percent-encoded. This module does no I/O.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

from redis.connection import parse_url

from tandem.errors import ConfigError

Kind = Literal["server", "sentinel", "cluster"]

_KINDS: dict[str, Kind] = {"redis": "server", "rediss": "server", "unix": "server"}
_KINDS |= {"redis+sentinel": "sentinel", "rediss+sentinel": "sentinel"}
_KINDS |= {"redis+cluster": "cluster", "rediss+cluster": "cluster"}
_PORTS: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. `options` has redis-py's options for connections to Redis servers, and
    `sentinel_options` has redis-py's options for connections to Sentinels."""

    kind: Kind
    tls: bool
    nodes: tuple[tuple[str, int], ...]  # (host, port) of each node; empty for a Unix socket
    service: str = ""  # name of the service that the Sentinels watch; empty without Sentinels
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The address as it appears in messages, without user and password."""
        where = ",".join(f"{host}:{port}" for host, port in self.nodes)
        if self.kind == "sentinel":
            return f"{where} (Sentinel service {self.service})"
        return where or str(self.options["path"])


def parse(url: str) -> RedisAddress:
    """Parses a URL. Raises ConfigError, which names the allowed forms and never shows the
    password."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _KINDS:
        raise ConfigError(
            f"a Redis URL must begin with one of {', '.join(f'{s}://' for s in _KINDS)}"
        )
    kind = _KINDS[scheme]
    tls = scheme.startswith("rediss")
    split = urlsplit(url)
    user, _, hosts = split.netloc.rpartition("@")
    if scheme == "unix":
        return RedisAddress(kind, tls, (), options=_options(url))
    nodes = tuple(_host_and_port(host, _PORTS[kind]) for host in (hosts or "localhost").split(","))
    if kind == "server" and len(nodes) > 1:
        raise ConfigError(
            "a redis:// URL names one server; for several use redis+sentinel:// or redis+cluster://"
        )
    service = ""
    path = split.path
    if kind == "sentinel":
        service, _, database = path.strip("/").partition("/")
        if not service:
            raise ConfigError("a Sentinel URL must name its service: redis+sentinel://HOST/SERVICE")
        path = f"/{database}" if database else ""
    options = _options(f"redis://{user}@host{path}?{split.query}")
    if kind == "cluster" and options.pop("db", 0):
        raise ConfigError("a Redis Cluster has database 0 only; remove the database from the URL")
    own = {
        name: options.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in options
    }
    if own and kind != "sentinel":
        raise ConfigError(
            "sentinel_username and sentinel_password are allowed only in redis+sentinel:// URLs"
        )
    shared = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return RedisAddress(kind, tls, nodes, service, options, {**shared, **own})


def _options(url: str) -> dict[str, Any]:
    """Converts the user, path and query of a URL for one server to options of redis-py."""
    try:
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"the Redis URL cannot be parsed: {error}") from None
    for name in ("connection_class", "host", "port"):
        options.pop(name, None)
    if url.startswith("unix") and "path" not in options:
        raise ConfigError("a unix:// URL must name the path of a socket")
    for name in _FILES:
        if name in options and not Path(str(options[name])).is_file():
            raise ConfigError(
                f"{name} of the Redis URL is {options[name]!r}: there is no such file"
            )
    return options


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{quote(text, safe=':[]%.-_')}")
        host = split.hostname
        port = split.port
    except ValueError:
        host = None
    if not host:
        raise ConfigError(f"{text!r} in the Redis URL must be HOST or HOST:PORT")
    return host, port if port is not None else default_port
