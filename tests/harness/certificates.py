"""Channels from tests to workers, with a router's certificate if calls are encrypted."""

from pathlib import Path

import grpc

from tandem.common.config.tls import certificate_name


def worker_channel(address: str, cluster_id: str, tls_dir: Path | None) -> grpc.Channel:
    """Opens a blocking channel; in plain text if the folder is None."""
    if tls_dir is None:
        return grpc.insecure_channel(address)
    roots, key, chain = ((tls_dir / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(roots, key, chain),
        options=[("grpc.ssl_target_name_override", certificate_name("worker", cluster_id))],
    )
