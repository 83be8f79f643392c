"""The TLS certificates of one run of `tandem up`.

  RUN_FOLDER/tls/router/    ca.crt, tls.crt and tls.key of the routers
  RUN_FOLDER/tls/worker/    the same files for the workers

A certificate authority signs the certificates. It exists only in memory: its key is never written
to disk. Machines that join receive the key and also keep it in memory. So they can create the
certificates of their own processes, and can let further machines join.
"""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.cluster.launch.options import certificate_folder
from tandem.common.config.tls import Kind

HostKind = Literal["ray", "join", "redis"]
HOST_KINDS: tuple[HostKind, ...] = ("ray", "join", "redis")

# Validity of certificates. It only has to be longer than a run, because the authority's key is lost
# when the run ends.
_LIFE = datetime.timedelta(days=3650)
# certificates are valid this long before now, for machines whose clock is behind
_BEFORE = datetime.timedelta(hours=1)


class Authority:
    """A certificate authority whose key is kept in memory."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._key: ec.EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"CA of {cluster_id}"[:64])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        # Two authorities may have the same name, for example while a new one replaces an old one.
        # Key identifiers distinguish them.
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def with_key(cls, cluster_id: str, certificate: bytes, key: bytes) -> "Authority":
        """Loads an authority from its PEM certificate and key. Raises ValueError if they cannot be
        read or do not belong together."""
        made = cls(cluster_id)
        try:
            loaded = serialization.load_pem_private_key(key, None)
        # TypeError means an encrypted key, UnsupportedAlgorithm an unknown kind of key.
        except (TypeError, UnsupportedAlgorithm) as error:
            raise ValueError(
                f"the certificate authority's private key cannot be read: {error}"
            ) from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(
                "the certificate authority's private key must be an elliptic-curve key"
            )
        made._key = loaded
        made._certificate = x509.load_pem_x509_certificate(certificate)
        if made._certificate.public_key() != loaded.public_key():
            raise ValueError(
                "the certificate authority's certificate and private key do not belong together"
            )
        made._name = made._certificate.subject
        made._key_id = x509.SubjectKeyIdentifier.from_public_key(loaded.public_key())
        # Tools compute the key identifier in different ways. So the identifier in the certificate
        # is used if there is one.
        with contextlib.suppress(x509.ExtensionNotFound):
            extensions = made._certificate.extensions
            made._key_id = extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return made

    @property
    def key_pem(self) -> bytes:
        return _private(self._key)

    @property
    def sha256(self) -> str:
        """SHA-256 of the certificate as hex digits. A joining machine compares it with the value of
        its option --ca-sha256."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    def write(
        self,
        folder: Path,
        kind: Kind | HostKind,
        *,
        roots: bytes = b"",
        addresses: Sequence[str] = (),
    ) -> None:
        """Creates a certificate for this kind of process. Writes it with its key and the trusted
        roots (by default this authority) to a folder that other users cannot read. `addresses` are
        additional IP addresses and DNS names of the certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"{kind}.{self._cluster_id}.tandem".lower()
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        names += map(_general_name, addresses)
        signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(kind), self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        _write(folder / "ca.crt", roots or self.pem)
        _write(folder / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / "tls.key", _private(key))


def write_certificates(
    run_folder: Path, cluster_id: str, authority: Authority | None = None
) -> None:
    """Writes the certificates of this machine's routers and workers. Their `--tls-dir` options name
    the folders."""
    authority = authority or Authority(cluster_id)
    kinds: tuple[Kind, ...] = ("router", "worker")
    for kind in kinds:
        authority.write(certificate_folder(run_folder, kind), kind)


def write_host_certificates(run_folder: Path, authority: Authority, address: str) -> None:
    """Writes the certificates for the ports that other hosts connect to: Ray, the join server and
    Redis. `address` is the IP address of this host."""
    for kind in HOST_KINDS:
        addresses = {address: None, "127.0.0.1": None}
        authority.write(host_folder(run_folder, kind), kind, addresses=list(addresses))


def host_folder(run_folder: Path, kind: HostKind) -> Path:
    return run_folder / "tls" / kind


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _LIFE)
    )


def _write(path: Path, data: bytes) -> None:
    """Replaces a file atomically, so that readers never see an incomplete file."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
