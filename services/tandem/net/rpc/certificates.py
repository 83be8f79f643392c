"""A TLS certificate with its key and trusted root certificates, reloaded when the files change.

For each new connection, the program checks whether the files have changed. If the files do not
match each other, for example while only the certificate has been replaced and not yet the key, the
last valid certificate remains in use.
"""

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM texts of a certificate chain, of the private key and of the trusted roots, all read
    at the same time, and a TLS server context made from these texts."""

    chain: bytes
    key: bytes = field(repr=False)
    context: ssl.SSLContext
    roots: bytes | None = None


class CertificateFiles:
    """The files of one certificate. Several threads may use an object at the same time."""

    def __init__(self, chain: Path, key: Path, roots: Path | None = None) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._paths = [chain, key] if roots is None else [chain, key, roots]
        self._lock = threading.Lock()
        try:
            self._stamp = self._stamps()
            self._certificate = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate {chain} cannot be used: {error}") from None

    @classmethod
    def in_folder(cls, folder: str) -> "CertificateFiles":
        """Uses the files of a folder that have the names of cert-manager: `tls.crt`, `tls.key` and
        `ca.crt`."""
        path = Path(folder)
        return cls(path / "tls.crt", path / "tls.key", path / "ca.crt")

    def current(self) -> Certificate:
        """Returns the current certificate. The result is the same object until the files change."""
        with self._lock:
            stamp = self._stamps()
            if stamp == self._stamp:
                return self._certificate
            try:
                read = self._read()
                # `stamp` is from before the read. If the files changed during the read, the next
                # call sees other stamps and reads the files again.
                if self._stamps() != stamp:
                    return self._certificate
                self._certificate = read
                log.info("the certificate %s has changed and was read again", self._paths[0])
            except (OSError, ValueError) as error:
                log.warning(
                    "the changed certificate %s cannot be used (%s), so the old one stays in use",
                    self._paths[0],
                    error,
                )
            self._stamp = stamp
            return self._certificate

    def _stamps(self) -> list[tuple[int, ...]]:
        """Returns values that change whenever one of the files changes."""
        return [_identity(path) for path in self._paths]

    def _read(self) -> Certificate:
        """Reads all files. Raises OSError (including ssl.SSLError) or ValueError if a file cannot
        be used or the files do not match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._paths[0], self._paths[1])
        texts = [path.read_bytes() for path in self._paths]
        if len(texts) > 2:
            context.load_verify_locations(cadata=texts[2].decode())
        return Certificate(texts[0], texts[1], context, *texts[2:])


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
