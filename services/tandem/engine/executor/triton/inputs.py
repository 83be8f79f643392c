"""The inputs of a step in one int32 array, so that a single copy moves them to the device.

A step has T tokens of S sequences. The first D sequences have one token each and use the decode
attention. The other C = S - D sequences have a chunk of several tokens each. There are L rows of
logits. A block table has M entries. Each of the G KV groups with keys and values has its own slots
and block tables. Each of the N state groups has a slot for each sequence.

    part of the array    shape        content
    token_ids            [T]
    positions            [T]
    slots                [G, T]       where each token's KV is stored
    context_lens         [S]          number of tokens in each sequence's context
    query_starts         [C + 1]      first row of each chunk, and the end of the last chunk
    logit_rows           [L]          the token row from which each row of logits is computed
    tile_rows            [16 * A]     the rows of each of the A tiles of LoRA adapters (LoraTiles)
    tile_adapters        [A]          the adapter of each tile
    states               [3 + N, S]   the spans of layers with a state, only if N is not 0: their
                                      first rows, counted without the first D rows for chunks;
                                      their numbers of rows; the positions of their first rows; and
                                      their slots in each state group
    block_tables         [G, S, M]    the block ids of each sequence

A step that replays a CUDA graph gets padding rows up to the number of rows of the graph. No KV is
stored for padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem_kernels.triton.lora import TILE_ROWS, LoraTiles, grouped
from tandem_kernels.triton.state_spans import DeviceSpans

NO_ADAPTERS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class StepShape:
    num_tokens: int  # T: number of tokens of the step
    num_seqs: int  # S: number of sequences
    num_single: int  # D: number of sequences with one token in the step
    num_logits: int  # L: number of rows of logits
    table_width: int  # M: number of entries of a block table
    num_groups: int = 1  # G: number of KV groups with keys and values
    num_tiles: int = 0  # A: number of tiles of LoRA adapters, in a step that replays a CUDA graph
    num_states: int = 0  # N: number of state groups, which come after the G groups

    @property
    def num_chunks(self) -> int:
        return self.num_seqs - self.num_single

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each part of the array, in the order of the module's table."""
        tokens = self.num_tokens
        seqs = self.num_seqs
        groups = self.num_groups
        tables = groups * seqs * self.table_width
        tiles = self.num_tiles
        sequences = (seqs, self.num_chunks + 1, self.num_logits)
        spans = (3 + self.num_states) * seqs if self.num_states else 0
        adapted = (TILE_ROWS * tiles, tiles)
        return (tokens, tokens, groups * tokens, *sequences, *adapted, spans, tables)


@dataclass(frozen=True, slots=True)
class StepViews:
    """Views of the parts of a step's array."""

    array: torch.Tensor
    shape: StepShape
    token_ids: torch.Tensor
    positions: torch.Tensor
    # [G, T]: the slot of each token, which is block id * block size + offset in the block. -1: no
    # KV is stored for this row.
    slots: torch.Tensor
    context_lens: torch.Tensor
    # The first row of each chunk, and the end of the last chunk. Rows are counted without the first
    # D rows. For example, chunks of 5 and 3 tokens give 0, 5, 8.
    query_starts: torch.Tensor
    logit_rows: torch.Tensor
    tiles: LoraTiles
    states: torch.Tensor  # [3 + N, S], or [0, S]
    block_tables: torch.Tensor  # [G, S, M]

    @classmethod
    def of(cls, array: torch.Tensor, shape: StepShape) -> StepViews:
        tokens, positions, slots, lens, starts, logit_rows, rows, adapters, states, tables = (
            torch.split(array, list(shape.sizes))
        )
        slots = slots.view(shape.num_groups, -1)
        tables = tables.view(shape.num_groups, shape.num_seqs, shape.table_width)
        states = states.view(-1, shape.num_seqs)
        of_tokens = (tokens, positions, slots, lens, starts, logit_rows)
        return cls(array, shape, *of_tokens, LoraTiles(rows, adapters), states, tables)

    def single_spans(self, group: int) -> DeviceSpans:
        """Returns the spans of the D single tokens in a state group."""
        return self._spans(group, slice(0, self.shape.num_single), 1)

    def chunk_spans(self, group: int) -> DeviceSpans:
        """Returns the spans of the C chunks in a state group. Rows are counted without the first D
        rows."""
        num_rows = self.shape.num_tokens - self.shape.num_single
        return self._spans(group, slice(self.shape.num_single, None), num_rows)

    def _spans(self, group: int, seqs: slice, max_rows: int) -> DeviceSpans:
        of_group = 3 + group - self.shape.num_groups
        firsts, nums, positions, slots = (self.states[i, seqs] for i in (0, 1, 2, of_group))
        return DeviceSpans(firsts, nums, positions, slots, max_rows)


def write_step(batch: StepBatch, block_size: int, num_states: int = 0) -> StepViews:
    """Writes a batch to a new array on the host, and returns the views of its parts."""
    shape = shape_of(batch, num_states)
    views = StepViews.of(torch.empty(sum(shape.sizes), dtype=torch.int32), shape)
    fill(views, batch, block_size)
    return views


def shape_of(batch: StepBatch, num_states: int = 0) -> StepShape:
    """Returns the shape of a batch without padding. The last `num_states` of the KV groups are
    state groups."""
    num_groups = len(batch.slices[0].block_tables) - num_states
    return StepShape(
        num_tokens=batch.num_tokens,
        num_seqs=len(batch.slices),
        num_single=sum(piece.num_tokens == 1 for piece in batch.slices),
        num_logits=sum(piece.num_logits for piece in batch.slices),
        table_width=max(
            len(table) for piece in batch.slices for table in piece.block_tables[:num_groups]
        ),
        num_groups=num_groups,
        num_states=num_states,
    )


def fill(
    views: StepViews, batch: StepBatch, block_size: int, adapters: Mapping[str, int] = NO_ADAPTERS
) -> None:
    """Writes a batch to views on the host, which may have more rows than the batch: padding.

    Padding among the D single tokens has an empty context. Padding after the rows of the chunks is
    a chunk of its own, which sees block 0, so that no row is left without numbers; the shape must
    have room for this chunk. No KV is stored for padding.

    `adapters` maps the digests of LoRA adapters to their numbers, for a shape with tiles of
    adapters. Surplus tiles have no rows.
    """
    shape = views.shape
    for part in (views.array, views.block_tables):
        part.zero_()
    views.slots.fill_(-1)
    views.tiles.rows.fill_(-1)
    token_ids = views.token_ids.numpy()
    positions = views.positions.numpy()
    slots = views.slots.numpy()
    tables = views.block_tables.numpy()
    starts = views.query_starts.numpy()
    context_lens = views.context_lens.numpy()
    states = views.states.numpy()
    seq = row = 0
    last_rows = {}
    rows_of: dict[int, list[int]] = {}  # adapter -> its rows
    for piece in _in_order(batch):
        if piece.num_tokens > 1 and seq < shape.num_single:
            seq = row = shape.num_single
        rows = slice(row, row + piece.num_tokens)
        token_ids[rows] = piece.token_ids
        places = np.arange(piece.context_len - piece.num_tokens, piece.context_len)
        positions[rows] = places
        for group, block_table in enumerate(piece.block_tables[: shape.num_groups]):
            table = np.array(block_table, np.int32)
            tables[group, seq, : len(table)] = table
            slots[group, rows] = table[places // block_size] * block_size + places % block_size
        context_lens[seq] = piece.context_len
        if shape.num_states:
            first = row - (shape.num_single if piece.num_tokens > 1 else 0)
            slots_of = [table[0] for table in piece.block_tables[shape.num_groups :]]
            states[:, seq] = [first, piece.num_tokens, places[0], *slots_of]
        row = rows.stop
        last_rows[id(piece)] = row - 1
        if shape.num_tiles and piece.adapter:
            rows_of.setdefault(adapters[piece.adapter], []).extend(range(rows.start, row))
        seq += 1
        if seq > shape.num_single:
            starts[seq - shape.num_single] = row - shape.num_single
    starts[seq - shape.num_single + 1 :] = shape.num_tokens - shape.num_single
    if num_padding := shape.num_tokens - row:
        context_lens[seq] = num_padding
    logit_rows = [
        row
        for p in batch.slices
        for row in range(last_rows[id(p)] + 1 - p.num_logits, last_rows[id(p)] + 1)
    ]
    views.logit_rows.numpy()[: len(logit_rows)] = logit_rows
    for part, numbers in zip(views.tiles, grouped(rows_of), strict=True):
        part.numpy()[: len(numbers)] = numbers


def adapted_rows(batch: StepBatch) -> dict[str, list[int]]:
    """Maps each adapter's digest to the rows that use the adapter. Rows are numbered as in the
    array that `write_step` creates."""
    rows: dict[str, list[int]] = {}
    first = 0
    for piece in _in_order(batch):
        if piece.adapter:
            rows.setdefault(piece.adapter, []).extend(range(first, first + piece.num_tokens))
        first += piece.num_tokens
    return rows


def _in_order(batch: StepBatch) -> list[SequenceSlice]:
    return sorted(batch.slices, key=lambda piece: piece.num_tokens > 1)


class DecodeRows:
    """Writes the inputs of decode steps with a fixed number of rows, always to the same array.

    Most of the array is block tables, which rarely change from step to step. A sequence keeps its
    row as long as it is in the steps, and only the entries of block tables that differ from the
    previous step are written. Rows of logits are in the order of the slices.
    """

    def __init__(self, array: torch.Tensor, shape: StepShape) -> None:
        """`array` is an int32 array on the host with `sum(shape.sizes)` elements."""
        assert shape.num_chunks == 0
        assert shape.num_logits == shape.num_tokens == shape.num_seqs
        self._views = StepViews.of(array, shape)
        self._views.query_starts.zero_()
        self._views.block_tables.zero_()
        self._tables = self._views.block_tables.numpy()
        self._known: list[list[list[int]]] = [
            [[] for _ in range(shape.num_seqs)] for _ in range(shape.num_groups)
        ]
        # The row of each sequence of the last step. A sequence is named by the identity of its
        # block table. If another sequence gets the same identity, `write` finds the differences.
        self._rows: dict[int, int] = {}

    def write(
        self, slices: Sequence[SequenceSlice], block_size: int
    ) -> list[tuple[int, int, int, int]]:
        """Writes the inputs of a step. Returns the ranges of the block tables that were written, as
        (group, row, first entry, end). All other parts of the array are written each time."""
        rows = self._rows_of(slices)
        places = [piece.context_len - 1 for piece in slices]
        views = self._views
        for part, values in (
            (views.token_ids, [piece.token_ids[0] for piece in slices]),
            (views.positions, places),
            (views.context_lens, [piece.context_len for piece in slices]),
        ):
            numbers = part.numpy()
            numbers[:] = 0
            numbers[rows] = values
        logit_rows = views.logit_rows.numpy()
        logit_rows[:] = 0
        logit_rows[: len(rows)] = rows
        changed = []
        if views.shape.num_states:
            states = views.states.numpy()
            states[:] = 0
            states[0, rows] = rows
            states[1, rows] = 1
            states[2, rows] = places
            for number in range(views.shape.num_states):
                group = views.shape.num_groups + number
                states[3 + number, rows] = [piece.block_tables[group][0] for piece in slices]
        slots = views.slots.numpy()
        slots[:] = -1
        for group in range(views.shape.num_groups):
            tables = [piece.block_tables[group] for piece in slices]
            slots[group, rows] = [
                table[place // block_size] * block_size + place % block_size
                for table, place in zip(tables, places, strict=True)
            ]
            for row, table in zip(rows, tables, strict=True):
                known = self._known[group][row]
                if table == known:
                    continue
                if table[: len(known)] != known:
                    known.clear()
                first = len(known)
                known += table[first:]
                self._tables[group, row, first : len(known)] = known[first:]
                changed.append((group, row, first, len(known)))
        return changed

    def _rows_of(self, slices: Sequence[SequenceSlice]) -> list[int]:
        """Returns a row for each slice: that of the step before if it had one, or else a free
        one."""
        before = self._rows
        names = [id(piece.block_table) for piece in slices]
        kept = {before[name] for name in names if name in before}
        free = (row for row in range(self._views.shape.num_seqs) if row not in kept)
        rows = [before[name] if name in before else next(free) for name in names]
        self._rows = dict(zip(names, rows, strict=True))
        return rows


class RowsInOrder(DecodeRows):
    """Gives row i to slice i in each step. The ranks of a tensor-parallel engine must have the same
    rows, and the identities of block tables differ between processes."""

    def _rows_of(self, slices: Sequence[SequenceSlice]) -> list[int]:
        return list(range(len(slices)))
