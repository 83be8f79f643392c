"""The chained hash that identifies a KV block by everything its contents depend on.

    hash of block 0 = H(root, tokens of block 0)
    hash of block 1 = H(hash of block 0, tokens of block 1), and so on

So the hash of a block covers all tokens from the start of the prompt to the end of the block. If a
block has tokens of an image, its hash also covers a mark, which says which image (prompt_image.py).
The *root* of this chain of block hashes is a hash of everything else that determines the KV (model,
dtypes, block size, LoRA adapter) and of the tenant's salt. Two blocks with the same hash have the
same KV on any worker. The hash is stable across processes, runs and machines.

_block_hash.c hashes whole prompts (128K tokens in 2.7 ms, mostly without the GIL). If it could not
be compiled, hashlib computes the hashes, seven times slower.
"""

import hmac
import logging
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

try:
    from tandem.common import _block_hash
except ImportError:
    _block_hash = None  # type: ignore[assignment]
    logging.getLogger(__name__).warning(
        "the compiled module _block_hash is missing, so prompts are hashed more slowly; install a "
        "C compiler, and then install tandem-llm again"
    )

HASH_VERSION = 1
HASH_BYTES = 16
_KEY = b"tandem.block_hash.v1"
NO_MARKS: Mapping[int, bytes] = {}


def chain_root(
    *,
    model_fingerprint: str,
    compute_dtype: str,
    numerics: str,
    kv_dtype: str,
    block_size: int,
    adapter: str = "",
    cache_salt: bytes = b"",
) -> bytes:
    """Returns the root of a chain of block hashes, 16 bytes. In the hash of a prompt's first block,
    the root takes the place of the previous block's hash.

    The arguments are the properties that all blocks of the chain share.
    """
    fields = (model_fingerprint, compute_dtype, numerics, kv_dtype, str(block_size), adapter)
    digest = blake2b(digest_size=HASH_BYTES, key=_KEY)
    for field in (*(f.encode() for f in fields), cache_salt):
        digest.update(struct.pack("<I", len(field)))
        digest.update(field)
    return digest.digest()


class Chain(NamedTuple):
    """The root and the block size of a prompt's chain of block hashes."""

    root: bytes
    block_size: int


def block_hash(parent: bytes, token_ids: Sequence[int], mark: bytes = b"") -> bytes:
    """Returns the hash of a block: 16 bytes of keyed BLAKE2b over `parent`, the token ids as
    little-endian uint32, and the block's mark. `parent` is the hash of the previous block, or the
    root for block 0."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + packed + mark, digest_size=HASH_BYTES, key=_KEY).digest()


def hash_blocks(
    root: bytes, token_ids: Sequence[int], block_size: int, marks: Mapping[int, bytes] = NO_MARKS
) -> list[bytes]:
    """Returns the hashes of the full blocks of `token_ids`, in order. A last block that is not full
    has no hash. `marks` has the marks of blocks with images, by the index of the block."""
    if not marks:
        return _chain(root, token_ids, block_size)
    hashes: list[bytes] = []
    num_full = len(token_ids) // block_size
    for index in sorted(index for index in marks if index < num_full):
        start = index * block_size
        hashes += _chain(root, token_ids[len(hashes) * block_size : start], block_size)
        root = block_hash(
            hashes[-1] if hashes else root, token_ids[start : start + block_size], marks[index]
        )
        hashes.append(root)
    return hashes + _chain(root, token_ids[len(hashes) * block_size :], block_size)


def _chain(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    if _block_hash is not None:
        return _block_hash.chain(root, token_ids, block_size, _KEY)
    return _hash_blocks_plainly(root, token_ids, block_size)


def _hash_blocks_plainly(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    num_full = len(token_ids) // block_size
    blocks = (token_ids[i * block_size : (i + 1) * block_size] for i in range(num_full))
    chain = accumulate(blocks, block_hash, initial=root)
    next(chain)
    return list(chain)


def tenant_salt(server_secret: bytes, tenant: str) -> bytes:
    """Returns HMAC(server secret, tenant): a salt that clients can neither choose nor guess."""
    return hmac.digest(server_secret, tenant.encode(), "sha256")[:HASH_BYTES]
