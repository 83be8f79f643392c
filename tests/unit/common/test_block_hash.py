"""Block hashes: stable for ever, chained, and different whenever the KV may differ."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common import block_hash as module
from tandem.common.block_hash import HASH_BYTES, block_hash, chain_root, hash_blocks, tenant_salt

FIELDS = {
    "model_fingerprint": "f" * 32,
    "compute_dtype": "bfloat16",
    "numerics": "fast",
    "kv_dtype": "bfloat16",
    "block_size": 16,
    "adapter": "",
    "cache_salt": b"",
}
ROOT = chain_root(**FIELDS)  # type: ignore[arg-type]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_values_never_change() -> None:
    # Workers of different versions share one tree: a change here needs a new HASH_VERSION.
    assert ROOT.hex() == "0ac18ca82b6e09dbaf8a42ad0b9bf19d"
    assert [h.hex() for h in hash_blocks(ROOT, list(range(32)), 16)] == [
        "159442da63a5f20df7d160ffa57dccd7",
        "436bcc073dd428f3048c14dc8a7d4535",
    ]


def test_it_is_compiled_here() -> None:
    assert module._block_hash is not None


@given(TOKENS, st.sampled_from([1, 3, 16, 28, 29, 40]))
def test_compiled_and_plain_agree(tokens: list[int], block_size: int) -> None:
    plain = module._hash_blocks_plainly(ROOT, tokens, block_size)
    assert hash_blocks(ROOT, tokens, block_size) == plain
    assert hash_blocks(ROOT, tuple(tokens), block_size) == plain


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_is_none_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks(ROOT, [token] * 16, 16)


def test_equal_in_another_process() -> None:
    code = (
        f"from tandem.common.block_hash import hash_blocks; "
        f"print(hash_blocks({ROOT!r}, [7] * 32, 16)[1].hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert printed.stdout.strip() == hash_blocks(ROOT, [7] * 32, 16)[1].hex()


@pytest.mark.parametrize("name", FIELDS)
def test_the_root_covers_every_field(name: str) -> None:
    value = FIELDS[name]
    other = {str: "x", int: 32, bytes: b"x"}[type(value)]
    assert chain_root(**FIELDS | {name: other}) != ROOT  # type: ignore[arg-type]


def test_fields_do_not_run_into_each_other() -> None:
    left = chain_root(**FIELDS | {"compute_dtype": "ab", "numerics": "c"})  # type: ignore[arg-type]
    right = chain_root(**FIELDS | {"compute_dtype": "a", "numerics": "bc"})  # type: ignore[arg-type]
    assert left != right


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_have_a_hash_and_each_follows_its_parent(
    tokens: list[int], block_size: int
) -> None:
    hashes = hash_blocks(ROOT, tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    parents = [ROOT, *hashes]
    for i, parent in enumerate(parents[:-1]):
        assert hashes[i] == block_hash(parent, tokens[i * block_size : (i + 1) * block_size])
        assert len(hashes[i]) == HASH_BYTES


@given(TOKENS, TOKENS)
def test_chains_agree_exactly_as_far_as_their_tokens_do(left: list[int], right: list[int]) -> None:
    left, right = left + right, left + right[::-1]
    pairs = zip(hash_blocks(ROOT, left, 4), hash_blocks(ROOT, right, 4), strict=True)
    assert [a == b for a, b in pairs] == [
        left[:end] == right[:end] for end in range(4, len(left) + 1, 4)
    ]


def test_a_salt_depends_on_secret_and_tenant() -> None:
    salts = {tenant_salt(s, t) for s in (b"one", b"two") for t in ("a", "b", "")}
    assert len(salts) == 6
    assert all(len(salt) == HASH_BYTES for salt in salts)
    assert tenant_salt(b"one", "a") == tenant_salt(b"one", "a")
