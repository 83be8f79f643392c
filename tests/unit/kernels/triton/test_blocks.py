"""Blocks that are packed, unpacked and copied, to the bit."""

from __future__ import annotations

import pytest
import torch

from tandem_kernels.triton.blocks import copy, pack, pack_spans, unpack

SHAPES = [(5, 2, 3, 2, 8, 16), (9, 1, 1, 2, 8, 8), (4, 3, 2, 2, 16, 80)]


def random_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_and_unpack(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    pool = random_pool(shape, dtype, device)
    ids = torch.tensor([3, 0, 2], device=device)
    staging = pack(pool, ids)
    assert torch.equal(staging, pool[ids])
    other = torch.zeros_like(pool)
    targets = torch.tensor([1, 3, 0], device=device)
    unpack(staging, other, targets)
    expected = torch.zeros_like(pool)
    expected[targets] = pool[ids]
    assert torch.equal(other, expected)


def test_copy_within_a_pool(device: torch.device) -> None:
    pool = random_pool(SHAPES[0], torch.float32, device)
    expected = pool.clone()
    expected[4], expected[1] = pool[0], pool[2]
    sources, targets = (torch.tensor(ids, device=device) for ids in ([0, 2], [4, 1]))
    copy(pool, sources, pool, targets)
    assert torch.equal(pool, expected)


def test_copy_to_another_pool(device: torch.device) -> None:
    source = random_pool((7, 3000), torch.float32, device)  # more words than a program copies
    target = torch.zeros((4, 3000), device=device)
    sources, targets = (torch.tensor(ids, device=device) for ids in ([6, 1], [0, 3]))
    copy(source, sources, target, targets)
    assert torch.equal(target[targets], source[sources])
    assert not target[1:3].any()


def test_no_blocks(device: torch.device) -> None:
    pool = random_pool(SHAPES[0], torch.float32, device)
    none = torch.tensor([], dtype=torch.int64, device=device)
    assert pack(pool, none).shape == (0, *pool.shape[1:])
    unpack(pack(pool, none), pool, none)


def test_pack_a_layer_major_pool(device: torch.device) -> None:
    layers = random_pool((3, 5, 2, 2, 8, 16), torch.bfloat16, device)
    ids = torch.tensor([4, 1], device=device)
    assert torch.equal(pack_spans(layers, ids), layers[:, ids].transpose(0, 1))
