"""The choice of keys in sparse attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tandem.common.dtypes import IndexKeys
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem_kernels.attention import scores
from tandem_kernels.attention_groups import QuerySpan, make_groups
from tandem_kernels.attention_invariant import KEY_TILE, scores_invariant
from tandem_kernels.key_choice import KeyChoice, Scores, highest
from tests.kv_pools import empty_pool

HEADS, DIM, BLOCK_SIZE, TOP_K = 3, 4, 8, 5


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 9])
def test_of_equal_scores_those_at_lower_positions_are_taken(num: int) -> None:
    row = [0.0, 2.0, -0.0, 1.0, 0.0, float("-inf"), 2.0]
    taken = highest(torch.tensor([row, row[::-1]]), num).nonzero().tolist()
    for which, each in enumerate((row, row[::-1])):
        ranked = sorted(range(len(each)), key=lambda i: (-each[i], i))
        expected = [i for i in ranked[:num] if each[i] > float("-inf")]
        assert [i for line, i in taken if line == which] == sorted(expected)


@pytest.mark.parametrize("compute", [scores, scores_invariant])
def test_each_query_chooses_the_best_of_the_keys_before_it(
    compute: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few products fit at once, so a chunk of queries is computed in parts."""
    monkeypatch.setattr("tandem_kernels.key_choice._PRODUCTS_MAX", 1000)
    generator = torch.Generator().manual_seed(2)
    layout = BlockLayout(
        *(40, 1, 2, BLOCK_SIZE, 6, "float32"), has_values=False, index=IndexKeys(2, DIM)
    )
    pool = empty_pool(layout)
    spans = [QuerySpan(0, 1, 4, [7]), QuerySpan(1, 1, 30, [3, 1, 9, 30])]
    spans.append(QuerySpan(2, 20, 50, [20, 4, 5, 22, 8, 11, 12]))
    keys = torch.randn(3, 50, DIM, generator=generator)
    for of_span, span in zip(keys, spans, strict=True):
        places = torch.arange(span.context_len)
        rows = pool.token_rows(torch.tensor(span.block_table)[places // 8], places % 8)
        pool.write_index(1, rows, of_span[: span.context_len])
    queries = torch.randn(22, HEADS, DIM, generator=generator)
    weights = torch.randn(22, HEADS, generator=generator)
    groups = make_groups(spans, pool, padded_to=KEY_TILE)
    choice = KeyChoice(groups, pool, compute).choose(1, queries, weights, TOP_K)
    assert [each.shape[:3] for each in choice] == [(2, 1, 1), (1, 1, 20)]
    rows_of_group = [[0, 1], list(range(2, 22))]
    for chosen, rows in zip(choice, rows_of_group, strict=True):
        for row, mask in zip(rows, chosen.flatten(0, 2), strict=True):
            span = spans[min(row, 2)]
            num_keys = span.context_len - span.num_queries + 1 + row - span.first_row
            assert mask.nonzero().flatten().tolist() == _chosen(
                queries[row], weights[row], keys[min(row, 2), :num_keys]
            )


def _chosen(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> Sequence[int]:
    found = ((queries @ keys.T).relu() * weights.unsqueeze(1)).sum(0).tolist()
    return sorted(sorted(range(len(found)), key=lambda i: (-found[i], i))[:TOP_K])
