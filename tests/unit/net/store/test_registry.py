"""The contract's comparison; what needs Redis is in tests/service/test_registry.py."""

from __future__ import annotations

import msgspec
import pytest

from tandem.net.store.registry import KvCompatibility

COMPATIBILITY = KvCompatibility(
    model_fingerprint="f" * 32,
    compute_dtype="bfloat16",
    numerics="fast",
    block_size=16,
    kv_dtype="bfloat16",
    layout="v1",
    hash_version=1,
)


def test_equal_contracts_do_not_differ() -> None:
    assert COMPATIBILITY.differences(COMPATIBILITY) == []


@pytest.mark.parametrize(
    "name", [f for f in KvCompatibility.__struct_fields__ if f != "tensor_parallel"]
)
def test_each_field_counts_and_is_named(name: str) -> None:
    value = getattr(COMPATIBILITY, name)
    other = msgspec.structs.replace(
        COMPATIBILITY, **{name: value + 1 if isinstance(value, int) else value + "x"}
    )
    (difference,) = COMPATIBILITY.differences(other)
    assert name in difference
    assert repr(value) in difference
    assert repr(getattr(other, name)) in difference


def test_the_degree_of_tensor_parallelism_may_differ() -> None:
    assert (
        COMPATIBILITY.differences(msgspec.structs.replace(COMPATIBILITY, tensor_parallel=4)) == []
    )
