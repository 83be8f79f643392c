"""The certificates of one run of `tandem up`: an authority of its own, which lives in memory.

    RUN_FOLDER/tls/router/{ca.crt,tls.crt,tls.key}     and tls/worker

Its key is never written: nobody can make a further certificate for this cluster.
"""

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.cluster.launch.options import certificate_folder
from tandem.config.tls import Kind, certificate_name

_LIFE = datetime.timedelta(days=3650)  # a run may last; the authority ends with it
_BEFORE = datetime.timedelta(hours=1)  # clocks of one machine agree, its past settings may not


class Authority:
    """A certificate authority whose key is in this process alone."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._key = ec.generate_private_key(ec.SECP256R1())
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
        # Two authorities of one name, as during a rotation, are told apart by the identifiers.
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

    def write(self, folder: Path, kind: Kind, *, roots: bytes = b"") -> None:
        """Writes a new certificate of this kind, its key and the trusted roots (by default its
        own). Nobody else can read the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = certificate_name(kind, self._cluster_id)
        signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(kind), self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        _write(folder / "ca.crt", roots or self.pem)
        _write(folder / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / "tls.key", private)


def write_certificates(run_folder: Path, cluster_id: str) -> None:
    """Writes the folders that the processes of a run get as `--tls-dir`."""
    authority = Authority(cluster_id)
    kinds: tuple[Kind, ...] = ("router", "worker")
    for kind in kinds:
        authority.write(certificate_folder(run_folder, kind), kind)


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
    """Replaces a file at once, so that no reader finds a part of it."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
