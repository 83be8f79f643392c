"""Opens gRPC channels to the cluster's workers, and the port of a worker's gRPC server. Both use
mutual TLS if it is configured.

When the certificate files change, new calls use a new channel. The old channel is closed after the
last of the calls on it has ended.

A client accepts only a certificate that names a worker of the client's cluster. The client checks
the certificate before it sends anything, so no other server gets the cluster's token or a prompt.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import grpc
import grpc.aio

from tandem.common.config.tls import certificate_name
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.certificates import Certificate, CertificateFiles
from tandem.net.rpc.channels import close_soon
from tandem.net.rpc.options import CHANNEL_OPTIONS


class PeerCalls:
    """Opens channels to workers. Each call on a channel must be made with `metadata`, which has the
    cluster's token."""

    def __init__(self, cluster_id: str, token: str, tls_dir: str = "") -> None:
        """`tls_dir` is the folder with the certificate. If it is empty, the channels do not use
        TLS. Raises ConfigError if the folder has no usable certificate."""
        self.metadata = token_metadata(token)
        self._worker_name = certificate_name("worker", cluster_id)
        self._files = CertificateFiles.in_folder(tls_dir) if tls_dir else None

    def open(self, address: str) -> grpc.aio.Channel:
        """Opens a channel, which connects on first use."""
        if self._files is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return cast(grpc.aio.Channel, RenewedChannel(address, self._files, self._worker_name))


class RenewedChannel:
    """A gRPC channel that uses the current certificate for each new call. The class has only those
    methods of `grpc.aio.Channel` that Tandem uses."""

    def __init__(self, address: str, files: CertificateFiles, peer_name: str) -> None:
        self._address = address
        self._files = files
        self._options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_name)]
        self._closed = False
        self._inner = _Opened(self._open(files.current()), files.current())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await self._inner.channel.close(grace)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.channel.get_state(try_to_connect)

    def unary_unary(self, method: str, *args: Any, **more: Any) -> Callable[..., Any]:
        return self._callable("unary_unary", method, *args, **more)

    def unary_stream(self, method: str, *args: Any, **more: Any) -> Callable[..., Any]:
        return self._callable("unary_stream", method, *args, **more)

    def stream_stream(self, method: str, *args: Any, **more: Any) -> Callable[..., Any]:
        return self._callable("stream_stream", method, *args, **more)

    def _callable(self, kind: str, *args: Any, **more: Any) -> Callable[..., Any]:
        made: tuple[_Opened | None, Any] = (None, None)

        def call(*call_args: Any, **call_more: Any) -> Any:
            nonlocal made
            inner = self._current()
            if made[0] is not inner:
                made = inner, getattr(inner.channel, kind)(*args, **more)
            return inner.count(made[1](*call_args, **call_more))

        return call

    def _current(self) -> "_Opened":
        certificate = self._files.current()
        if certificate is not self._inner.certificate and not self._closed:
            old = self._inner
            self._inner = _Opened(self._open(certificate), certificate)
            old.retire()
        return self._inner

    def _open(self, certificate: Certificate) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            certificate.roots, certificate.key, certificate.chain
        )
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)


class _Opened:
    """A gRPC channel that was opened with one certificate, and the number of open calls on it."""

    def __init__(self, channel: grpc.aio.Channel, certificate: Certificate) -> None:
        self.channel = channel
        self.certificate = certificate
        self._num_calls = 0
        self._retired = False

    def count(self, call: Any) -> Any:
        self._num_calls += 1
        call.add_done_callback(self._on_done)
        return call

    def retire(self) -> None:
        """Closes the channel as soon as no call on it is open."""
        self._retired = True
        if not self._num_calls:
            close_soon(self.channel)

    def _on_done(self, _: object) -> None:
        self._num_calls -= 1
        if self._retired and not self._num_calls:
            close_soon(self.channel)


def add_port(server: grpc.aio.Server, address: str, files: CertificateFiles | None) -> int:
    """Adds a port to a server. If `files` is given, the port uses TLS. If `files` includes trusted
    root certificates, clients must have a certificate, too."""
    if files is None:
        return server.add_insecure_port(address)
    served = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificate if the files have changed since the last call. Otherwise returns
        None. gRPC calls this function in a thread before each handshake."""
        nonlocal served
        if (certificate := files.current()) is served:
            return None
        served = certificate
        return _configuration(certificate)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        fetch,  # type: ignore[arg-type]  # the stubs do not allow None
        require_client_authentication=served.roots is not None,
    )
    return server.add_secure_port(address, credentials)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], certificate.roots
    )
