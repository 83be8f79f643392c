"""Seals the bytes of blocks before they leave the worker's memory. To seal means to encrypt, if
there is a key. Without a key the bytes stay unchanged.

An encrypted block has these fields (sizes in bytes):

    key id, 8 | nonce, 12 | the block's bytes, encrypted | tag, 16

Encryption is AES-256-GCM (NIST SP 800-38D). The associated data are the identity of the KV and the
block's hash, so the bytes of another block fail to decrypt. Nonces are random. With random nonces,
NIST allows 2^32 blocks for a key.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tandem.engine.tiers.storage import BadBlock, Bytes
from tandem.errors import ConfigError

_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEAD_BYTES = _ID_BYTES + _NONCE_BYTES


class Seal(Protocol):
    name: str  # name of the format of sealed bytes
    num_extra_bytes: int  # number of bytes that sealing adds to a block

    def seal(self, block_hash: bytes, data: Bytes) -> Bytes:
        """Returns the sealed bytes, which may be `data` itself."""

    def buffer(self, target: Bytes) -> Bytes:
        """Returns memory for the sealed bytes of a block, which `open` then unseals into `target`.
        The memory may be `target` itself."""

    def open(self, block_hash: bytes, sealed: Bytes, target: Bytes) -> None:
        """Unseals `sealed` into `target`. `sealed` is the memory that `buffer` returned, filled
        with the sealed bytes. Raises BadBlock."""


class Plain:
    name = "plain"
    num_extra_bytes = 0

    def seal(self, block_hash: bytes, data: Bytes) -> Bytes:
        return data

    def buffer(self, target: Bytes) -> Bytes:
        return target

    def open(self, block_hash: bytes, sealed: Bytes, target: Bytes) -> None:
        """Does nothing. The bytes are in `target` already, because `buffer` returned `target`."""


class Encrypted:
    name = "aes-256-gcm"
    num_extra_bytes = _HEAD_BYTES + _TAG_BYTES

    def __init__(self, keys: list[bytes], identity: str) -> None:
        """The first of `keys` seals blocks; the others only open blocks that they sealed earlier.
        `identity` names everything on which the KV depends."""
        self._ciphers = {key_id(key): AESGCM(key) for key in keys}
        self._own = key_id(keys[0])
        self._identity = identity.encode()

    def seal(self, block_hash: bytes, data: Bytes) -> Bytes:
        sealed = np.empty(data.nbytes + self.num_extra_bytes, np.uint8)
        head = self._own + os.urandom(_NONCE_BYTES)
        sealed[:_HEAD_BYTES] = np.frombuffer(head, np.uint8)
        cipher = self._ciphers[self._own]
        nonce = head[_ID_BYTES:]
        cipher.encrypt_into(nonce, data.data, self._about(block_hash), sealed[_HEAD_BYTES:].data)
        return sealed

    def buffer(self, target: Bytes) -> Bytes:
        return np.empty(target.nbytes + self.num_extra_bytes, np.uint8)

    def open(self, block_hash: bytes, sealed: Bytes, target: Bytes) -> None:
        head = sealed[:_HEAD_BYTES].tobytes()
        cipher = self._ciphers.get(head[:_ID_BYTES])
        if cipher is None:
            key_id = head[:_ID_BYTES].hex()
            raise BadBlock(
                f"the block is encrypted with key {key_id}, but kv-key-file lacks this key"
            )
        about = self._about(block_hash)
        body = sealed[_HEAD_BYTES:].data
        try:
            cipher.decrypt_into(head[_ID_BYTES:], body, about, target.data)
        except (InvalidTag, ValueError) as error:
            raise BadBlock(
                "the block cannot be decrypted, because bytes of the block have changed"
            ) from error

    def _about(self, block_hash: bytes) -> bytes:
        return block_hash + self._identity


def make_seal(key_file: str, identity: str) -> Seal:
    """Returns the seal for the keys in `key_file`. If `key_file` is empty, blocks stay unencrypted.
    Raises ConfigError."""
    return Encrypted(read_keys(Path(key_file).expanduser()), identity) if key_file else Plain()


def read_keys(path: Path) -> list[bytes]:
    """Reads keys of 32 bytes, one per line in hexadecimal digits. Raises ConfigError."""
    try:
        mode = path.stat().st_mode
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kv-key-file {path} cannot be read: {error}") from error
    if mode & 0o007:
        raise ConfigError(
            f"every user of this machine has access to kv-key-file {path} (mode {mode & 0o777:o}); "
            f"run chmod o= {path}"
        )
    lines = text.split()
    if not lines or not all(re.fullmatch("[0-9a-fA-F]{64}", line) for line in lines):
        raise ConfigError(
            f"kv-key-file {path} must have a key of 64 hexadecimal digits on each line. `openssl "
            "rand -hex 32` makes a key"
        )
    return [bytes.fromhex(line) for line in lines]


def key_id(key: bytes) -> bytes:
    """Returns an identifier of a key that does not reveal the key."""
    return hashlib.sha256(b"tandem.kv_key.v1" + key).digest()[:_ID_BYTES]
