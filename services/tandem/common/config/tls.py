"""Settings of TLS, and the names in the certificates of a cluster's processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from tandem.common.config.groups import HTTP, Own
from tandem.common.options import Options, Text
from tandem.errors import ConfigError

# Kind of a process. The kind of a process never changes, while a worker's role may change.
Kind = Literal["router", "worker", "controller"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TlsDir = Annotated[
    Text,
    Parameter(
        help=(
            "Folder with ca.crt, tls.crt and tls.key, for TLS between the cluster's processes. "
            "Default: no TLS."
        )
    ),
    Own,
]


def certificate_name(kind: Kind, cluster_id: str) -> str:
    """Returns the DNS name in the certificates of all processes of this kind in a cluster."""
    return f"{kind}.{cluster_id}.tandem".lower()


@Parameter(name="*", group=HTTP)
@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTls(Options):
    """The certificate of the two public ports, which clients see."""

    tls_cert: Annotated[Text, Own] = ""
    """PEM file with the certificate chain of the public HTTP and gRPC ports. Default: no TLS."""
    tls_key: Annotated[Text, Own] = ""
    """PEM file with the private key of --tls-cert."""

    def check_together(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key must be given together")
