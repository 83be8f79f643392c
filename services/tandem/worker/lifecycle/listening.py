"""Opens the port of a worker's gRPC service."""

import grpc.aio

from tandem.common.config.worker import WorkerConfig
from tandem.errors import ConfigError
from tandem.net.rpc.auth import KindInterceptor, TokenInterceptor
from tandem.net.rpc.block_bytes import EncodedByHandler
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.rpc.failures import FailureInterceptor, quiet_peer_faults
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.peer_calls import add_port
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server


def listen(config: WorkerConfig, servicer: WorkerServicer) -> tuple[grpc.aio.Server, str]:
    """Returns a gRPC server that is bound to its port and not started yet, and its address
    (HOST:PORT). Raises ConfigError if the port cannot be opened."""
    quiet_peer_faults()
    cluster = config.cluster
    server = grpc.aio.server(
        interceptors=[
            TokenInterceptor(cluster.token),
            *([KindInterceptor(cluster.cluster_id)] if config.tls_dir else []),
            FailureInterceptor(),
            EncodedByHandler(),
        ],
        options=SERVER_OPTIONS,
    )
    add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    wanted = f"{config.host}:{config.port}"
    files = CertificateFiles.in_folder(config.tls_dir) if config.tls_dir else None
    try:
        port = add_port(server, wanted, files)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {wanted}: {error}") from error
    return server, f"{config.host}:{port}"
