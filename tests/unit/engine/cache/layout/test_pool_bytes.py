from __future__ import annotations

import pytest
import torch

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.errors import InternalError


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_read_of_one_pool_is_written_to_another(dtype: str, device: str) -> None:
    layout = KvLayout.of_one(BlockLayout(6, 2, 3, 4, 8, dtype))
    producer = torch.randn(6, 2, 3, 2, 4, 8).to(getattr(torch, dtype)).to(device)
    target = torch.zeros_like(producer)
    data = pool_bytes(producer, layout).read([5, 0, 3])
    assert len(data) == 3 * layout.block_bytes
    pool_bytes(target, layout).write([1, 2, 4], bytes(data))
    assert torch.equal(target[[1, 2, 4]], producer[[5, 0, 3]])
    assert not target[[0, 3, 5]].any()


def test_bytes_that_are_not_whole_blocks_are_refused() -> None:
    layout = KvLayout.of_one(BlockLayout(2, 1, 1, 1, 4, "float32"))
    pool = pool_bytes(torch.zeros(2, 1, 1, 2, 1, 4), layout)
    with pytest.raises(InternalError, match="2 KV blocks have 64 bytes"):
        pool.write([0, 1], b"abc")
