from __future__ import annotations

import torch

from tandem_kernels.kv_cache import KvPool
from tests.kv_pools import pool_of

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
