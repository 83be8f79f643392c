"""Sends the request of this machine to join a cluster (protocol.py). The machine verifies the
cluster's certificate authority before it sends the join token."""

import hashlib
import http.client
import ipaddress
import json
import socket
import ssl
from importlib.metadata import version

import msgspec

from tandem.cluster.joining.protocol import JoinReply, JoinRequest
from tandem.errors import ConfigError

_DEADLINE_S = 10.0
_BYTES_MAX = 100_000


def request_join(
    host: str, port: int, *, token: str, ca_sha256: str, own_address: str
) -> tuple[JoinReply, str]:
    """Sends a join request to a host of the cluster. Returns the host's reply and the address of
    this machine: `own_address`, or if that is empty, the local address of the connection. Raises
    ConfigError if the machine cannot join."""
    where = f"{host}:{port}"
    try:
        ca = _fetch_ca(host, port)
        found = hashlib.sha256(ca).hexdigest()
        if found != ca_sha256.replace(":", "").lower():
            raise ConfigError(
                f"the certificate authority at {where} has the SHA-256 fingerprint {found}, not "
                f"the fingerprint in --ca-sha256. Either {where} belongs to another cluster, or "
                "someone intercepts the connection. This machine did not send the join token"
            )
        context = ssl.create_default_context(cadata=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return _send_request(host, port, context, _name_in(ca), token, own_address)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(f"the cluster at {where} cannot be joined: {error}") from error


def _fetch_ca(host: str, port: int) -> bytes:
    """Fetches the authority's certificate, in DER, over a connection that is not verified. No
    secret is sent. Raises ValueError unless the server sends exactly one certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=_DEADLINE_S, context=unverified)
    try:
        connection.request("GET", "/ca")
        text = connection.getresponse().read(_BYTES_MAX)
    finally:
        connection.close()
    certificates = x509.load_pem_x509_certificates(text)
    if len(certificates) != 1:
        raise ValueError(
            f"the join server sent {len(certificates)} CA certificates; exactly one is allowed. "
            "This machine did not send the join token"
        )
    return certificates[0].public_bytes(Encoding.DER)


def _name_in(ca: bytes) -> str:
    """Returns the DNS name of the join server. The authority's name contains the cluster's id, from
    which this name is built: "CA of local-1a" gives join.local-1a.tandem."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    (name,) = x509.load_der_x509_certificate(ca).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return f"join.{str(name.value).removeprefix('CA of ')}.tandem".lower()


def _send_request(
    host: str, port: int, context: ssl.SSLContext, name: str, token: str, own_address: str
) -> tuple[JoinReply, str]:
    raw = socket.create_connection((host, port), timeout=_DEADLINE_S)
    with raw, context.wrap_socket(raw, server_hostname=name) as verified:
        own_address = own_address or str(ipaddress.ip_address(verified.getsockname()[0]))
        connection = http.client.HTTPConnection(host, port)
        connection.sock = verified
        request = JoinRequest(version("tandem-llm"), own_address)
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/join", msgspec.json.encode(request), headers)
        reply = connection.getresponse()
        body = reply.read(_BYTES_MAX)
    if reply.status != 200:
        raise ConfigError(f"{host}:{port} refused to let this host join: {_reason(body)}")
    return msgspec.json.decode(body, type=JoinReply), own_address


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])
