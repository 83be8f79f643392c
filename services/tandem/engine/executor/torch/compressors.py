"""The compressors of compressed attention (models/config/compressor.py), computed with torch for
one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from tandem.engine.cache.layout.kv_groups import entry_places, input_places
from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.weights.decoder_weights import CompressorWeights, EntryWeights, Linear
from tandem.models.config.compressor import Compressor
from tandem.models.config.model import ModelConfig
from tandem_kernels.attention_groups import AttentionGroup, Entries, QuerySpan
from tandem_kernels.dispatch import Angles, Kernels
from tandem_kernels.key_choice import choose_keys
from tandem_kernels.rope import rotary_angles, rotate_last_pairs
from tandem_kernels.row_pool import RowPool
from tandem_kernels.state_pool import Pool

Project = Callable[[torch.Tensor, tuple[Linear, ...]], torch.Tensor]
Tables = tuple[torch.Tensor, torch.Tensor]  # frequencies and factors of `rotary_angles`


@dataclass(frozen=True, slots=True)
class _Runs:
    """The N runs of one compressor that end in the step."""

    # Rows of the tokens' inputs, [N, tokens from which an entry is computed]. Rows of tokens before
    # the start of a sequence are 0.
    inputs: torch.Tensor
    is_missing: torch.Tensor  # bool, of the same shape: true for tokens before the start
    entries: torch.Tensor  # [N]: rows of the entries
    angles: Angles  # at the runs' first tokens


@dataclass(frozen=True, slots=True)
class _Seen:
    """The entries of one compressor that the queries of a group may see."""

    block_tables: torch.Tensor  # [B, M]: the blocks that have entries
    hidden: torch.Tensor  # bool [B, num_queries, E]


class StepCompressors:
    """Writes the inputs of entries, and the entries of the runs that end in the step. Returns the
    entries to which the queries of each layer attend.

    In each method, `layer` is the number of a layer and `weights` are those of its compressor. `x`
    has the normalized hidden states, [rows, hidden].
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        project: Project,
        groups: Sequence[AttentionGroup],
        pools: Sequence[Pool],
        inputs: StepInputs,
        tables: Sequence[Tables],
    ) -> None:
        """`groups` are those of attention. `tables` has the frequencies of each layer."""
        self._config = config
        self._kernels = kernels
        self._project = project
        self._groups = groups
        self._num_tokens = inputs.num_tokens
        self._entry_places = entry_places(config)
        self._input_places = input_places(config)
        self._pools = pools
        self._token_rows = inputs.token_rows
        self._runs: dict[Compressor, _Runs | None] = {}
        self._seen: dict[Compressor, list[_Seen]] = {}
        for layer, spec in enumerate(config.layers):
            compressor = spec.compressor
            if compressor is None or compressor in self._runs:
                continue
            at, of_inputs = self._entry_places[layer], self._input_places[layer]
            assert at is not None
            assert of_inputs is not None
            pool = self._pool(at.group)
            spans = inputs.spans[at.group]
            self._runs[compressor] = _ending_runs(
                compressor, pool, spans, inputs.spans[of_inputs.group], tables[layer]
            )
            self._seen[compressor] = _seen(compressor, pool, spans, groups)

    def write(self, layer: int, weights: CompressorWeights, x: torch.Tensor) -> None:
        """Writes the inputs of the step's tokens, and the entries of runs that end."""
        compressor = self._config.layers[layer].compressor
        of_inputs, of_entries = self._input_places[layer], self._entry_places[layer]
        assert compressor is not None
        assert of_inputs is not None
        assert of_entries is not None
        pool = self._pool(of_inputs.group)
        made = self._project(x, weights.inputs)[: self._num_tokens]
        pool.write(of_inputs.number, self._token_rows[of_inputs.group], made)
        if (runs := self._runs[compressor]) is None:
            return
        rows = pool.read(of_inputs.number, runs.inputs).float()
        first = 0
        for part, of_part in enumerate(weights.parts):
            width = 2 * of_part.bias.shape[1]
            own, gates = torch.split(rows[..., first : first + width], width // 2, -1)
            entries = self._entries(own, gates, of_part, runs)
            self._pool(of_entries.group).write(of_entries.number + part, runs.entries, entries)
            first += width

    def entries(
        self,
        layer: int,
        weights: CompressorWeights,
        x: torch.Tensor,
        query_latents: torch.Tensor,
        angles: Angles,
    ) -> list[Entries]:
        """Returns the entries for each group of attention. `query_latents` is [rows, q rank]. The
        entries of the runs that end in the step must be in the pool."""
        compressor, place = self._config.layers[layer].compressor, self._entry_places[layer]
        assert compressor is not None
        assert place is not None
        pool, indexer = self._pool(place.group), compressor.indexer
        queries = shares = None
        if indexer is not None:
            assert weights.queries is not None
            assert weights.head_weights is not None
            heads = self._kernels.linear(query_latents, weights.queries, None)
            queries = rotate_last_pairs(heads.view(len(x), -1, indexer.dim), angles)
            shares = self._kernels.linear(x.float(), weights.head_weights, None)
        made = []
        for group, seen in zip(self._groups, self._seen[compressor], strict=True):
            hidden = seen.hidden
            if indexer is not None and hidden.shape[-1] > indexer.top_k:
                assert queries is not None
                assert shares is not None
                rows = slice(group.first_row, group.first_row + group.num_rows)
                keys = pool.gather(place.number + 1, seen.block_tables)
                padding = -keys.shape[1] % _KEYS_MULTIPLE
                chosen = choose_keys(
                    pad(keys, (0, 0, 0, padding)),
                    pad(hidden, (0, padding), value=True),
                    queries[rows],
                    shares[rows],
                    indexer.top_k,
                    self._kernels.scores,
                )
                hidden = ~chosen[..., : hidden.shape[-1]]
            made.append(Entries(pool.gather(place.number, seen.block_tables), hidden))
        return made

    def _entries(
        self, own: torch.Tensor, gates: torch.Tensor, weights: EntryWeights, runs: _Runs
    ) -> torch.Tensor:
        """Returns the entries of runs, [N, dim], from the inputs and gates of their tokens, fp32
        [N, tokens, dim or 2 dim]. With overlap, the first tokens are those of the run before."""
        rate, width = weights.bias.shape
        gates = torch.unflatten(gates, 1, (-1, rate)) + weights.bias
        own = torch.unflatten(own, 1, (-1, rate))
        if own.shape[1] == 2:
            halves = torch.split(gates, width // 2, -1), torch.split(own, width // 2, -1)
            gates, own = (torch.cat((a[:, :1], b[:, 1:]), 1) for a, b in halves)
        gates, own = gates.flatten(1, 2), own.flatten(1, 2)
        gates = gates.masked_fill(runs.is_missing.unsqueeze(-1), float("-inf"))
        shares = (gates - gates.amax(1, keepdim=True)).exp()
        entries = _sum(shares * own) / _sum(shares)
        normed = self._kernels.rms_norm(entries, weights.norm, self._config.rms_norm_eps)
        return rotate_last_pairs(normed.unsqueeze(1), runs.angles).squeeze(1)

    def _pool(self, group: int) -> RowPool:
        pool = self._pools[group]
        assert isinstance(pool, RowPool)
        return pool


_KEYS_MULTIPLE = 64  # kernels with invariant numerics need a multiple of so many keys


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the second dimension of [N, tokens, dim]. The order of additions depends
    on the number of tokens only, not on N."""
    while (num := terms.shape[1]) > 1:
        half = num // 2
        pairs = terms[:, :half] + terms[:, half : 2 * half]
        terms = pairs if num % 2 == 0 else torch.cat((pairs, terms[:, -1:]), 1)
    return terms[:, 0]


def _ending_runs(
    compressor: Compressor,
    pool: RowPool,
    spans: Sequence[QuerySpan],
    input_spans: Sequence[QuerySpan],
    tables: Tables,
) -> _Runs | None:
    """Returns the runs that end in the step; None if there are none. `pool` and `spans` are those
    of the entries, `input_spans` those of the inputs."""
    rate, size = compressor.rate, pool.block_size
    in_block = max(1, size // rate)
    before = torch.arange(-compressor.num_seen, 0)
    input_rows, are_missing, entry_rows, firsts = [], [], [], []
    for span, input_span in zip(spans, input_spans, strict=True):
        done = span.context_len - span.num_queries
        ends = torch.arange(done // rate + 1, span.context_len // rate + 1) * rate
        if not len(ends):
            continue
        places = ends.unsqueeze(1) + before
        at = places.clamp(min=0)
        blocks = torch.tensor(input_span.block_table)
        input_rows.append(torch.where(places < 0, 0, blocks[at // size] * size + at % size))
        are_missing.append(places < 0)
        last = ends - 1
        blocks = torch.tensor(span.block_table)
        entry_rows.append(blocks[last // size] * in_block + last % size // rate)
        firsts.append(ends - rate)
    if not firsts:
        return None
    device = pool.memory.device
    inputs, is_missing, entries, first_tokens = (
        torch.cat(each).to(device) for each in (input_rows, are_missing, entry_rows, firsts)
    )
    return _Runs(inputs, is_missing, entries, rotary_angles(first_tokens, *tables))


def _seen(
    compressor: Compressor,
    pool: RowPool,
    spans: Sequence[QuerySpan],
    groups: Sequence[AttentionGroup],
) -> list[_Seen]:
    """Returns the entries of each group of attention. `spans` has the sequences of all groups."""
    rate, size = compressor.rate, pool.block_size
    in_block = max(1, size // rate)
    step = max(1, rate // size)  # Only each so many-th block has an entry.
    device = pool.memory.device
    seen = []
    first = 0
    for group in groups:
        own = spans[first : first + group.num_seqs]
        first += group.num_seqs
        lens = [span.context_len for span in own]
        block_tables = torch.zeros(len(own), -(-max(lens) // (size * step)), dtype=torch.long)
        for row, span in zip(block_tables, own, strict=True):
            blocks = span.block_table[step - 1 : -(-span.context_len // size) : step]
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.long)
        queries = torch.arange(1 - group.num_queries, 1)
        ends = torch.tensor(lens).view(-1, 1, 1) + queries.view(-1, 1)
        hidden = torch.arange(block_tables.shape[1] * in_block) >= ends // rate
        seen.append(_Seen(block_tables.to(device), hidden.to(device)))
    return seen
