from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tandem.common.dtypes import IndexKeys, RotatedKey
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels import kv_fp8, kv_int4, kv_int8
from tandem_kernels.kv_cache import KvPool
from tests.kv_pools import empty_pool, pool_of

NUM_BLOCKS, HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM = 5, 3, 2, 4, 8


def make_pool() -> tuple[torch.Tensor, KvPool]:
    kv = torch.zeros(NUM_BLOCKS, HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
    return kv, pool_of(kv)


def test_write_puts_each_token_into_its_slot_of_its_layer_only() -> None:
    kv, pool = make_pool()
    block_ids, offsets = torch.tensor([3, 0, 3]), torch.tensor([1, 3, 2])
    keys, values = torch.randn(3, HEADS, HEAD_DIM), torch.randn(3, HEADS, HEAD_DIM)
    pool.write(1, pool.token_rows(block_ids, offsets), keys, values)
    expected = torch.zeros_like(kv)
    for token, (block, offset) in enumerate(zip(block_ids, offsets, strict=True)):
        expected[block, :, 1, 0, offset] = keys[token]
        expected[block, :, 1, 1, offset] = values[token]
    assert torch.equal(kv, expected)


def test_gather_brings_blocks_together_in_the_order_of_their_tables() -> None:
    kv, pool = make_pool()
    kv.copy_(torch.randn_like(kv))
    tables = torch.tensor([[4, 1, 1], [0, 2, 3]])
    for layer in range(LAYERS):
        gathered = pool.gather(layer, pool.block_rows(tables), num_seqs=2)
        assert gathered.shape == (2, 2, HEADS, 3 * BLOCK_SIZE, HEAD_DIM)
        for sequence, table in enumerate(tables):
            for which in range(2):
                expected = torch.cat([kv[block, :, layer, which] for block in table], dim=1)
                assert torch.equal(gathered[which, sequence], expected)


@pytest.mark.parametrize("has_values", [True, False])
def test_index_keys_are_beside_the_kv_of_their_block(has_values: bool) -> None:
    """No KV of a head changes, and no key of another indexer or token."""
    index = IndexKeys(2, 5)
    layout = BlockLayout(
        *(NUM_BLOCKS, 1, LAYERS, BLOCK_SIZE, HEAD_DIM, "float32"), has_values, index=index
    )
    pool = empty_pool(layout)
    block_ids, offsets = torch.tensor([3, 0, 3]), torch.tensor([1, 3, 2])
    rows = pool.token_rows(block_ids, offsets)
    pool.kv.copy_(torch.randn_like(pool.kv))
    kv = pool.kv.clone()
    keys = torch.randn(3, index.dim)
    pool.write_index(1, rows, keys)
    assert torch.equal(pool.kv, kv)
    tables = torch.tensor([[3, 1], [4, 0]])
    expected = torch.zeros(2, 2 * BLOCK_SIZE, index.dim)
    expected[0, 1], expected[0, 2], expected[1, BLOCK_SIZE + 3] = keys[0], keys[2], keys[1]
    assert torch.equal(pool.gather_index(1, tables), expected)
    assert not pool.gather_index(0, tables).any()
    heads = torch.randn(3, 1, HEAD_DIM)
    pool.write(1, rows, heads, heads)
    assert torch.equal(pool.gather_index(1, tables), expected)
    assert torch.equal(pool.kv[3, :, 1, 0, 1], heads[0])
    assert torch.equal(
        pool.gather(1, pool.block_rows(tables), 2)[1, 1, 0, BLOCK_SIZE + 3], heads[1, 0]
    )


def test_a_pool_without_values_brings_its_rows_as_both() -> None:
    layout = BlockLayout(NUM_BLOCKS, 1, LAYERS, BLOCK_SIZE, HEAD_DIM, "float32", has_values=False)
    pool = empty_pool(layout)
    assert pool.kv.shape == (NUM_BLOCKS, 1, LAYERS, 1, BLOCK_SIZE, HEAD_DIM)
    block_ids, offsets = torch.tensor([3, 0, 3]), torch.tensor([1, 3, 2])
    keys = torch.randn(3, 1, HEAD_DIM)
    pool.write(1, pool.token_rows(block_ids, offsets), keys, keys)
    expected = torch.zeros_like(pool.kv)
    expected[block_ids, :, 1, 0, offsets] = keys
    assert torch.equal(pool.kv, expected)
    pool.kv.copy_(torch.randn_like(pool.kv))
    tables = torch.tensor([[4, 1, 1], [0, 2, 3]])
    for layer in range(LAYERS):
        gathered = pool.gather(layer, pool.block_rows(tables), num_seqs=2)
        for sequence, table in enumerate(tables):
            rows = torch.cat([pool.kv[block, :, layer, 0] for block in table], dim=1)
            for part in gathered[:, sequence]:
                assert torch.equal(part, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_of_int8_latents_keeps_rotated_keys_as_they_are(dtype: torch.dtype) -> None:
    rank, rope = 16, 8
    rotated = RotatedKey(rope, str(dtype).removeprefix("torch."))
    sizes = NUM_BLOCKS, 1, LAYERS, BLOCK_SIZE, rank + rope
    layout = BlockLayout(*sizes, "int8", has_values=False, rotated=rotated)
    pool = empty_pool(layout)
    block_ids, offsets = torch.tensor([3, 0, 3]), torch.tensor([1, 3, 2])
    rows = torch.randn(3, 1, rank + rope)
    pool.write(1, pool.token_rows(block_ids, offsets), rows, rows)
    expected, expected_rows = torch.zeros_like(pool.memory), torch.zeros(3, rank + rope)
    for token, (block, offset) in enumerate(zip(block_ids, offsets.tolist(), strict=True)):
        numbers, scale = kv_int8.quantize(rows[token, 0, :rank])
        key = rows[token, 0, rank:].to(dtype)
        at = layout.layer_bytes + offset * rank
        expected[block, at : at + rank] = numbers.view(torch.uint8)
        at = layout.layer_bytes + BLOCK_SIZE * rank + offset * key.nbytes
        expected[block, at : at + key.nbytes] = key.view(torch.uint8)
        at = layout.layer_bytes + BLOCK_SIZE * (rank + key.nbytes) + 2 * offset
        expected[block, at : at + 2] = scale.view(1).view(torch.uint8)
        expected_rows[token] = torch.cat((kv_int8.widen(numbers, scale), key.float()))
    assert torch.equal(pool.memory, expected)
    for kept in pool.gather(1, pool.block_rows(torch.tensor([[3, 0]])), 1):
        found = kept.view(2, BLOCK_SIZE, -1)[[0, 1, 0], offsets]
        assert torch.equal(found, expected_rows)


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        ("int8", (kv_int8, kv_int8)),
        ("fp8_e4m3", (kv_fp8, kv_fp8)),
        ("k8v4", (kv_int8, kv_int4)),
    ],
)
class TestQuantized:
    def test_write_puts_numbers_and_scales_where_the_layout_says(
        self, dtype: str, formats: tuple[ModuleType, ModuleType]
    ) -> None:
        layout = layout_of(dtype)
        pool = empty_pool(layout)
        block_ids, offsets = torch.tensor([3, 0, 3]), torch.tensor([1, 3, 2])
        rows = torch.randn(2, 3, HEADS, HEAD_DIM)  # K, V
        pool.write(1, pool.token_rows(block_ids, offsets), rows[0], rows[1])
        expected = torch.zeros_like(pool.memory)
        of_key, of_value = layout.row_bytes
        for token, (block, offset) in enumerate(zip(block_ids, offsets, strict=True)):
            for head in range(HEADS):
                part = head * layout.head_bytes + layout.layer_bytes
                runs = (part, of_key), (part + BLOCK_SIZE * of_key, of_value)
                scales = part + BLOCK_SIZE * (of_key + of_value)
                for which, (run, row_bytes) in enumerate(runs):
                    numbers, scale = formats[which].quantize(rows[which, token, head])
                    at = run + int(offset) * row_bytes
                    expected[block, at : at + row_bytes] = numbers.view(torch.uint8)
                    at = scales + 2 * (which * BLOCK_SIZE + int(offset))
                    expected[block, at : at + 2] = scale.view(1).view(torch.uint8)
        assert torch.equal(pool.memory, expected)

    def test_gather_brings_the_numbers_that_bytes_stand_for(
        self, dtype: str, formats: tuple[ModuleType, ModuleType]
    ) -> None:
        pool = empty_pool(layout_of(dtype))
        blocks = torch.arange(NUM_BLOCKS).repeat_interleave(BLOCK_SIZE)
        slots = pool.token_rows(blocks, torch.arange(BLOCK_SIZE).repeat(NUM_BLOCKS))
        written = torch.randn(LAYERS, 2, len(blocks), HEADS, HEAD_DIM)
        for layer in range(LAYERS):
            pool.write(layer, slots, *written[layer])
        tables = torch.tensor([[4, 1, 1], [0, 2, 3]])
        for layer in range(LAYERS):
            gathered = pool.gather(layer, pool.block_rows(tables), num_seqs=2)
            assert gathered.shape == (2, 2, HEADS, 3 * BLOCK_SIZE, HEAD_DIM)
            for sequence, table in enumerate(tables):
                tokens = torch.cat([torch.arange(4) + 4 * block for block in table])
                for which, kind in enumerate(formats):
                    rows = written[layer][which, tokens]
                    expected = kind.widen(*kind.quantize(rows)).transpose(0, 1)
                    assert torch.equal(gathered[which, sequence], expected)


def layout_of(dtype: str) -> BlockLayout:
    return BlockLayout(NUM_BLOCKS, HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM, dtype)
