"""Settings of `tandem redis-front`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.common.options import Options, Port


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFrontOptions(Options):
    """A TLS port in front of a Redis server that listens at a Unix socket."""

    cluster_id: str
    """Id of the cluster whose routers and workers may connect."""
    socket: str
    """Path of the Redis server's Unix socket."""
    tls_dir: str
    """Folder with the TLS files of `tandem redis-front`: ca.crt, tls.crt and tls.key."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 6379
    """Port to listen on."""
