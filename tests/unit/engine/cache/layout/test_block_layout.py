from __future__ import annotations

from typing import Any

import pytest

from tandem.common.dtypes import IndexKeys, RotatedKey
from tandem.engine.cache.layout.block_layout import BlockLayout


def smollm2(dtype: str, **sizes: Any) -> BlockLayout:
    fields = {
        "num_blocks": 7,
        "num_kv_heads": 3,
        "num_layers": 30,
        "block_size": 16,
        "head_dim": 64,
    }
    return BlockLayout(**(fields | sizes), dtype=dtype)


def test_plain_dtypes_have_their_numbers_and_nothing_else() -> None:
    layout = smollm2("bfloat16")
    assert layout.row_bytes == (64 * 2, 64 * 2)
    assert layout.layer_bytes == 2 * 16 * 64 * 2
    assert layout.head_bytes == 30 * layout.layer_bytes
    assert layout.block_bytes == 3 * layout.head_bytes == 368_640
    assert layout.pool_bytes == 7 * layout.block_bytes
    assert layout.describe() == "block-major heads=3 layers=30 block=16 head_dim=64 dtype=bfloat16"


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_8_bits_have_scales_and_almost_twice_the_tokens(dtype: str) -> None:
    layout = smollm2(dtype)
    assert layout.row_bytes == (64, 64)
    assert layout.layer_bytes == 2 * 16 * 64 + 2 * 16 * 2 == 33 * 64
    assert smollm2("bfloat16").block_bytes / layout.block_bytes == pytest.approx(1.939, abs=1e-3)
    assert layout.describe().endswith(f"dtype={dtype} scales=float16")


def test_k8v4_has_values_of_half_the_bytes() -> None:
    layout = smollm2("k8v4")
    assert layout.row_bytes == (64, 32)
    assert layout.layer_bytes == 16 * (64 + 32) + 2 * 16 * 2 == 25 * 64
    assert smollm2("bfloat16").block_bytes / layout.block_bytes == 2.56
    assert layout.describe().endswith("dtype=k8v4 scales=float16")


def test_int4_has_keys_of_four_and_a_half_bits() -> None:
    layout = smollm2("int4")
    assert layout.row_bytes == (36, 32)
    assert layout.layer_bytes == 16 * (36 + 32) + 2 * 16 * 2 == 18 * 64
    assert smollm2("bfloat16").block_bytes / layout.block_bytes == pytest.approx(3.556, abs=1e-3)
    assert layout.describe().endswith("dtype=int4 scales=float16")


def test_latent_attention_has_no_values() -> None:
    layout = smollm2("bfloat16", num_kv_heads=1, head_dim=576, has_values=False)
    assert layout.row_bytes == (576 * 2, 0)
    assert layout.layer_bytes == 16 * 576 * 2
    assert layout.describe().endswith(
        "heads=1 layers=30 block=16 head_dim=576 dtype=bfloat16 values=none"
    )


def test_index_keys_follow_all_heads_in_whole_parts() -> None:
    """DeepSeek V3.2's sizes: the keys of 61 indexers take 13.6 parts."""
    sizes = {"num_kv_heads": 1, "num_layers": 61, "head_dim": 576, "has_values": False}
    without = smollm2("bfloat16", **sizes)
    layout = smollm2("bfloat16", **sizes, index=IndexKeys(61, 128))
    assert layout.head_bytes == without.block_bytes
    assert layout.block_bytes == (61 + 14) * layout.layer_bytes
    assert 13 * layout.layer_bytes < 61 * 128 * 16 * 2 < 14 * layout.layer_bytes
    assert layout.describe() == without.describe() + " index=61x128"


@pytest.mark.parametrize(("dtype", "key_bytes"), [("bfloat16", 128), ("float32", 256)])
def test_int8_of_latent_attention_leaves_rotated_keys_as_they_are(
    dtype: str, key_bytes: int
) -> None:
    sizes = {"num_kv_heads": 1, "head_dim": 576, "has_values": False}
    layout = smollm2("int8", **sizes, rotated=RotatedKey(64, dtype))
    assert layout.row_bytes == (512, key_bytes)
    needed = 16 * (512 + key_bytes + 2)  # one scale
    assert layout.layer_bytes % 64 == 0
    assert needed <= layout.layer_bytes < needed + 64
    assert layout.describe().endswith(
        f"head_dim=576 dtype=int8 scales=float16 values=none rotated=64x{dtype}"
    )


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_every_part_of_int8_begins_a_cache_line(block_size: int, head_dim: int) -> None:
    layout = smollm2("int8", block_size=block_size, head_dim=head_dim)
    needed = 2 * block_size * (head_dim + 2)
    assert layout.layer_bytes % 64 == 0
    assert needed <= layout.layer_bytes < needed + 64


def test_a_block_that_is_not_there_has_no_offset() -> None:
    layout = smollm2("int8")
    assert layout.offset(6) == 6 * layout.block_bytes
    with pytest.raises(ValueError, match="block id is 7"):
        layout.offset(7)
