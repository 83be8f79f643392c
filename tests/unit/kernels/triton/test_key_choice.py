"""The choice of keys in sparse attention, and attention to chosen keys, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from tandem.common.dtypes import IndexKeys
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels import norm, rope
from tandem_kernels.attention import scores
from tandem_kernels.attention_groups import QuerySpan, make_groups
from tandem_kernels.key_choice import KeyChoice
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.triton import key_choice
from tandem_kernels.triton.decode_attention import Splits, decode_attention
from tandem_kernels.triton.key_choice import ChosenKeys, QueryPlaces, choose_keys, index_heads
from tandem_kernels.triton.latent_decode import latent_decode_attention
from tandem_kernels.triton.latent_loop import LatentQueries
from tests.kv_pools import empty_pool
from tests.unit.kernels.triton.paged import LAYER, Paged

HEADS, DIM, BLOCK_SIZE, NUMBER = 3, 20, 8, 1
# Two single tokens, of which one has few keys, and a chunk of 9 tokens.
SPANS = [
    QuerySpan(0, 1, 4, [7]),
    QuerySpan(1, 1, 30, [3, 1, 9, 30]),
    QuerySpan(2, 9, 45, [20, 4, 5, 22, 8, 11]),
]
NUM_ROWS = 11


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Returns small random integers, whose products and sums are exact. Many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def filled_pool(device: torch.device) -> KvPool:
    """Returns a pool with the keys of an indexer."""
    layout = BlockLayout(
        *(40, 1, 2, BLOCK_SIZE, 6, "float32"), has_values=False, index=IndexKeys(2, DIM)
    )
    pool = empty_pool(layout, device)
    pool.index_keys(NUMBER).copy_(integers(40, BLOCK_SIZE, DIM, seed=2))
    return pool


def places(device: torch.device) -> QueryPlaces:
    """The places of the rows of SPANS, and of a row of padding."""
    tables = torch.zeros(3, 6, dtype=torch.int32)
    for row, span in zip(tables, SPANS, strict=True):
        row[: len(span.block_table)] = torch.tensor(span.block_table, dtype=torch.int32)
    seqs = torch.tensor([0, 1, *[2] * 9, 0], dtype=torch.int32)
    lens = torch.tensor([4, 30, *range(37, 46), 0], dtype=torch.int32)
    return QueryPlaces(*(each.to(device) for each in (tables, seqs, lens)))


def keys_of(chosen: ChosenKeys, row: int, number: int) -> list[int]:
    """Returns the keys of a list, in its order."""
    size, num_keys = chosen.unit_size, int(chosen.places.lens[row])
    units = chosen.units[row, number].tolist()[: -(-num_keys // size)]
    return [key for unit in units for key in range(unit * size, min((unit + 1) * size, num_keys))]


@pytest.mark.parametrize("scores_max", [1 << 26, 200], ids=["at once", "in parts"])
@pytest.mark.parametrize("top_k", [1, 5, 30, 99])
def test_tokens(
    top_k: int, scores_max: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_choice, "_SCORES_MAX", scores_max)
    pool = filled_pool(device)
    queries = integers(NUM_ROWS + 1, HEADS, DIM, seed=3).to(device)
    # With negative weights, scores are below 0, and -0 if all products are.
    shares = integers(NUM_ROWS + 1, HEADS, seed=4).to(device)
    chosen = choose_keys(
        queries,
        shares,
        pool.index_keys(NUMBER),
        places(device),
        top_k,
        block_size=None,
        num_local=0,
        context_len_max=45,
    )
    # Room for a power of 2, so that few kernels are compiled.
    assert chosen.units.shape == (NUM_ROWS + 1, 1, min(top_k, 64))
    groups = make_groups(SPANS, pool)
    masks = KeyChoice(groups, pool, scores).choose_tokens(NUMBER, queries, shares, top_k)
    rows = [row for mask in masks for row in mask[:, 0].flatten(0, 1)]
    for row, mask in enumerate(rows):
        assert keys_of(chosen, row, 0) == mask.nonzero().flatten().tolist(), row


@pytest.mark.parametrize(("num_local", "top_k"), [(0, 1), (1, 3), (2, 3), (1, 9)])
def test_blocks(num_local: int, top_k: int, device: torch.device) -> None:
    """Blocks of 7 keys, which are not the blocks of the pool."""
    pool = filled_pool(device)
    queries = integers(NUM_ROWS + 1, HEADS, DIM, seed=3).to(device)
    chosen = choose_keys(
        queries,
        None,
        pool.index_keys(NUMBER),
        places(device),
        top_k,
        block_size=7,
        num_local=num_local,
        context_len_max=48,
    )
    groups = make_groups(SPANS, pool)
    masks = KeyChoice(groups, pool, scores).choose_blocks(
        NUMBER, queries, top_k, block_size=7, num_local=num_local
    )
    rows = [row for mask in masks for row in mask.transpose(1, 2).flatten(0, 1)]
    for row, of_heads in enumerate(rows):
        for head in range(HEADS):
            # A context of few blocks has one mask for all heads.
            mask = of_heads[min(head, len(of_heads) - 1)]
            assert keys_of(chosen, row, head) == mask.nonzero().flatten().tolist(), (row, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads(has_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    """LayerNorm of keys alone, or RMSNorm of keys and queries. The angles are those of larger
    heads."""
    pool = filled_pool(device)
    before = pool.memory.clone()
    generator = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    queries, keys, weight, bias = randn(4, HEADS * DIM), randn(4, DIM), randn(DIM), randn(DIM)
    slots = torch.tensor([3 * BLOCK_SIZE + 5, -1, 0, 7], device=device)
    angles = rope.rotary_angles(
        torch.tensor([5, 0, 300, 9999]), rope.rotary_frequencies(24, 10_000.0), 1.1
    )
    cos, sin = (each.to(device) for each in angles)
    found = index_heads(
        queries,
        keys,
        (cos, sin),
        slots,
        pool.index_keys(NUMBER),
        rope_dim=8,
        key_norm=weight,
        key_bias=bias if has_bias else None,
        key_eps=1e-5,
        query_norm=None if has_bias else bias,
        query_eps=1e-6,
    )
    expected = queries.view(4, HEADS, DIM)
    if has_bias:
        normed = layer_norm(keys, (DIM,), weight, bias, 1e-5)
    else:
        normed = norm.rms_norm(keys, weight, 1e-5)
        expected = norm.rms_norm(expected, bias, 1e-6)
    few = cos[..., :4], sin[..., :4]
    expected, normed = (
        torch.cat((rope.rotate(each[..., :8], few), each[..., 8:]), -1)
        for each in (expected, normed.unsqueeze(1))
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    stored = pool.index_keys(NUMBER).flatten(0, 1)
    kept = slots >= 0
    torch.testing.assert_close(
        stored[slots[kept]], normed[kept, 0].float(), rtol=tolerance, atol=tolerance
    )
    pool.index_keys(NUMBER).flatten(0, 1)[slots[kept]] = 0
    pool.memory[3], pool.memory[0] = before[3], before[0]
    assert torch.equal(pool.memory, before)


def some_units(lens: list[int], size: int, top_k: int, num_lists: int) -> torch.Tensor:
    """Returns random lists of units, [queries, lists, top_k]. What is not listed is -1."""
    generator = torch.Generator().manual_seed(6)
    units = torch.full((len(lens), num_lists, top_k), -1, dtype=torch.int32)
    for row, num_keys in zip(units, lens, strict=True):
        num_units = -(-num_keys // size)
        for each in row:
            some = torch.randperm(num_units, generator=generator)[:top_k].sort().values
            each[: len(some)] = some
    return units


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("size", "top_k"), [(1, 6), (5, 3)])
def test_attention_to_chosen_keys(
    size: int, top_k: int, num_splits: int, device: torch.device
) -> None:
    """The rest of each context's last block is NaN."""
    lens = [33, 17]
    paged = Paged.random(
        lens, num_kv_heads=2, head_dim=24, block_size=8, dtype="float32", device=device
    )
    seqs = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    ends = [17, 33, 9, 0]
    of_queries = torch.tensor(ends, dtype=torch.int32, device=device)
    units = some_units(ends, size, top_k, 2).to(device)
    places = QueryPlaces(paged.block_tables, seqs, of_queries)
    chosen = ChosenKeys(units, size, places)
    queries = torch.randn(4, 4, 24, generator=torch.Generator().manual_seed(5)).to(device)
    rows = paged.pool.block_rows(paged.block_tables.long())
    keys, values = paged.pool.gather(LAYER, rows, 2).double()
    for seq, num_keys in enumerate(lens):
        last = paged.block_tables[seq, (num_keys - 1) // 8].long()
        paged.layer[last, :, :, num_keys % 8 :] = torch.nan
    found = decode_attention(
        queries,
        paged.layer,
        paged.block_tables,
        of_queries,
        splits=Splits(num_splits, num_splits),
        chosen=chosen,
    )
    for row, seq in enumerate(seqs.tolist()):
        for head in range(4):
            own = keys_of(chosen, row, head // 2)
            if not own:
                assert not found[row, head].any()
                continue
            query = queries[row, head].double()
            products = keys[seq, head // 2, own] @ query / 24**0.5
            expected = torch.softmax(products, 0) @ values[seq, head // 2, own]
            torch.testing.assert_close(found[row, head].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_latent_attention_to_chosen_keys(num_splits: int, device: torch.device) -> None:
    rank, rope_dim, num_heads = 24, 8, 3
    paged = Paged.random(
        [33, 17],
        num_kv_heads=1,
        head_dim=rank + rope_dim,
        block_size=8,
        dtype="float32",
        device=device,
        has_values=False,
    )
    seqs = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    ends = [17, 33, 9, 0]
    of_queries = torch.tensor(ends, dtype=torch.int32, device=device)
    places = QueryPlaces(paged.block_tables, seqs, of_queries)
    chosen = ChosenKeys(some_units(ends, 1, 20, 1).to(device), 1, places)
    generator = torch.Generator().manual_seed(5)
    absorbed = torch.randn(4, num_heads, rank, generator=generator).to(device)
    turning = torch.randn(4, num_heads, rope_dim, generator=generator).to(device)
    angles = rope.rotary_angles(of_queries.cpu() - 1, rope.rotary_frequencies(8, 10_000.0), 1.0)
    cos, sin = (each.to(device) for each in angles)
    found = latent_decode_attention(
        LatentQueries(absorbed, turning, cos, sin),
        paged.layer,
        paged.block_tables,
        of_queries,
        splits=Splits(num_splits, num_splits),
        scale=0.2,
        chosen=chosen,
    )
    whole = torch.cat((absorbed, rope.rotate(turning, (cos, sin))), -1).double()
    rows = paged.pool.block_rows(paged.block_tables.long())
    latents = paged.pool.gather(LAYER, rows, 2)[0].double()
    for row, seq in enumerate(seqs.tolist()):
        own = latents[seq, 0, keys_of(chosen, row, 0)]
        weights = torch.softmax(0.2 * whole[row] @ own.T, -1) if len(own) else whole[row] @ own.T
        expected = weights @ own[:, :rank]
        torch.testing.assert_close(found[row].double(), expected, rtol=2e-5, atol=2e-5)
