"""KV groups: the layers of a model that keep KV by the same rule. Each group has its own pool and
block tables.

A rule is full attention, a sliding window of one size, or linear attention, whose layers keep a
state. For example, a model whose layers alternate between full attention and a window of 1,024
tokens has two groups. A layer may be in no group, or have attention and a state and so be in two.
A layer with a compressor is in three: one has its KV, one its entries, which all later tokens see,
and one the inputs of entries, in a window (models/config/compressor.py).

The pool of a group with linear attention, a *state group*, has slots in place of blocks. A slot has
the states of all layers of the group after some number of tokens. There are two kinds of slots:

- A running state belongs to one sequence. Each step of the sequence changes it.
- A frozen state is a copy of a running state at the end of a block, cached under the hash of the
  block. It never changes. A request can resume after this block.

So for all other code, a state group is a group with a window of one block, in which few blocks are
cached.

All pools lie in one span of memory. Block ids are unique among the pools: the ids of a group follow
those of the group before. A slot has several consecutive ids, one for each piece in which it is
transferred, so that no read is much larger than others.

    ids      [ group 0: 0 .. n0 - 1 | group 1: n0 .. n0 + n1 - 1 | ... ]
    memory   [ pool of group 0      | pool of group 1            | ... ]

Most models have one group. A block then has the same id in its pool and among all pools. This
module imports no tensor library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

from tandem.engine.cache.layout.block_layout import BlockLayout, num_blocks_of
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.engine.cache.layout.row_layout import RowLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.errors import ConfigError
from tandem.models.config.compressor import Compressor
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import LinearAttention
from tandem.models.config.model import ModelConfig
from tandem.models.limits import why_not_block_size, why_not_kv_dtype

if TYPE_CHECKING:
    from tandem.common.config.engine import EngineOptions
    from tandem.common.kv_budget import KvBudget

# A sequence that is computed may need three slots: a frozen state to resume after, its running
# state, and a frozen state that is transferred.
SLOTS_OF_SEQUENCE = 3
# A sequence that awaits its states from a peer holds the latter two. Beside it, there must be room
# for a prompt that is computed for that peer.
_SLOTS_MIN = SLOTS_OF_SEQUENCE + 2

# Maximum number of sequences of a step that verify proposed tokens, if the model has states. Each
# needs a scratch slot (pool/window_pool.py).
_SCRATCH_SLOTS = 4

INNER_CHUNK = 64  # tokens that kernels compute together by matrix products (docs/kernels.md)

# Typical number of tokens that a prompt has in common with an earlier one, if it has many.
_COMMON_TOKENS = 8192

# Maximum number of tokens in a step on a CPU, unless --max-tokens-per-step is given.
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The layers that keep KV by one rule, and the layout of their pool."""

    layers: tuple[int, ...]  # indices of the model's layers, ascending
    # Number of tokens that a token sees, including itself. None: a token sees all tokens before it.
    # In a state group, it is such that the first token of a block sees the block before it.
    window: int | None
    layout: BlockLayout
    # Number of first tokens (sinks) that every token sees in addition to the window.
    num_first: int = 0

    @property
    def has_states(self) -> bool:
        """True for a state group."""
        return isinstance(self.layout, StateLayout)

    @property
    def num_pieces(self) -> int:
        """Number of block ids of a block or slot among all pools. It is 1 for a block."""
        return self.layout.num_pieces if isinstance(self.layout, StateLayout) else 1

    def first_seen(self, num_tokens: int) -> int:
        """Returns the index of the first block in the window of the next token after `num_tokens`
        tokens. For example, after 100 tokens, a window of 40 tokens starts at token 61, in block 3
        of 16 tokens each."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // self.layout.block_size

    @property
    def blocks_seen(self) -> int:
        """Number of earlier blocks that the first token of a block sees: 3 with a window of 40
        tokens and blocks of 16. Only for a group with a window."""
        assert self.window is not None
        return -(-(self.window - 1) // self.layout.block_size)

    @property
    def kept_blocks(self) -> int:
        """Number of blocks at the start of a sequence that hold the sinks (`num_first`)."""
        return -(-self.num_first // self.layout.block_size)

    @property
    def decode_blocks(self) -> int | None:
        """Largest number of blocks over which a token and all tokens that it sees can spread. None
        without a window. In a state group 1, the running state."""
        if self.has_states:
            return 1
        return None if self.window is None else self.kept_blocks + self.blocks_seen + 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV groups of a model with the layouts of their pools. There is at least one group."""

    groups: tuple[KvGroup, ...]

    @classmethod
    def of_one(cls, layout: BlockLayout) -> KvLayout:
        """Returns the layout of a model whose layers form one group without a window."""
        return cls((KvGroup(tuple(range(layout.num_layers)), None, layout),))

    def of_rank(self, num_ranks: int) -> KvLayout:
        """Returns the layout of one rank's pools, if `num_ranks` ranks have a pool each with some
        of the heads. Raises Incompatible if the heads cannot be divided among the ranks."""
        return KvLayout(
            tuple(
                replace(
                    group,
                    layout=replace(
                        group.layout,
                        num_kv_heads=RankHeads(group.layout.num_kv_heads, num_ranks).per_rank,
                    ),
                )
                for group in self.groups
            )
        )

    def under(self, budget: KvBudget) -> KvLayout:
        """Returns the layout for a sequence with a KV budget: a group without a window gets the
        window that the budget allows."""
        first, last = budget.visible
        return KvLayout(
            tuple(
                replace(group, window=last, num_first=first) if group.window is None else group
                for group in self.groups
            )
        )

    @property
    def block_size(self) -> int:
        """Tokens in a block; the same in all groups."""
        return self.groups[0].layout.block_size

    @property
    def num_kv_heads(self) -> int:
        """KV heads in a block of the first group. State groups have another number, and groups with
        a window may have one if a single rank has all heads."""
        return self.groups[0].layout.num_kv_heads

    @property
    def has_windows(self) -> bool:
        """True if some groups have a window. State groups count as groups with a window."""
        return any(group.window is not None for group in self.groups)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The numbers of the state groups."""
        return tuple(number for number, group in enumerate(self.groups) if group.has_states)

    @property
    def has_working_states(self) -> bool:
        """True if the states of running sequences are in float32 beside the pools, because slots
        have another dtype."""
        return self.working_bytes(1) > 0

    def working_bytes(self, num_seqs: int) -> int:
        """Returns the bytes of the states in float32 beside the pools; 0 if there are none."""
        return sum(
            group.layout.working(num_seqs).pool_bytes
            for group in self.groups
            if isinstance(group.layout, StateLayout) and group.layout.dtype != "float32"
        )

    @property
    def without_states(self) -> KvLayout:
        """The layout of the groups that are not state groups."""
        return KvLayout(tuple(group for group in self.groups if not group.has_states))

    def blocks_of(self, num_tokens: int) -> int:
        """Returns the number of blocks that `num_tokens` tokens need. The last one may be partly
        filled."""
        return -(-num_tokens // self.block_size)

    def sequence_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the number of blocks that a decoding sequence of `num_tokens` tokens holds in
        each group."""
        blocks = self.blocks_of(num_tokens)
        return tuple(min(blocks, group.decode_blocks or blocks) for group in self.groups)

    def held_blocks(self, group: KvGroup) -> int | None:
        """Returns the largest number of blocks that one sequence holds in a group between steps.
        None without a window: it holds as many as its tokens need.

        With states this is more than a token sees. The last frozen states of a prompt are up to
        `state_spacing` tokens before its end, and a peer gets the blocks that are seen after them.
        Example: with a window of 40 tokens, blocks of 16 and a prompt of 255 tokens, the states are
        frozen after 192 tokens, and the blocks from token 153 on are held, 7 blocks.
        """
        if group.decode_blocks is None or group.has_states or not self.state_groups:
            return group.decode_blocks
        return group.decode_blocks - 1 + state_spacing(self.block_size) // self.block_size

    @property
    def tokens_max(self) -> int | None:
        """Largest number of tokens that one sequence can have with these pools. None: any number
        fits, because every group has a window and enough blocks for it."""
        return min(
            (
                group.layout.num_blocks * self.block_size
                for group in self.groups
                if (held := self.held_blocks(group)) is None or group.layout.num_blocks < held
            ),
            default=None,
        )

    def deepest_hit(
        self, block_hashes: Sequence[bytes], depth: int, has: Callable[[int, bytes], bool]
    ) -> int:
        """Returns the largest number of leading blocks, at most `depth`, after which a request can
        resume: each group with a window has all blocks that the next token sees.

        `has(group, block_hash)` says whether the group has a block.
        """
        while gap := self._last_gap(block_hashes, depth, has):
            depth = gap - 1
        return depth

    def _last_gap(
        self, block_hashes: Sequence[bytes], depth: int, has: Callable[[int, bytes], bool]
    ) -> int:
        """Returns 1 + the index of the last missing block among those that windows need after
        `depth` blocks. Returns 0 if no such block is missing."""
        gap = 0
        for number, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = group.first_seen(depth * self.block_size)
            for index in range(depth - 1, first - 1, -1):
                if not has(number, block_hashes[index]):
                    gap = max(gap, index + 1)
                    break
            if group.has_states and gap == depth:
                # Few blocks have a state, so the blocks without one are skipped here.
                while gap > 1 and not has(number, block_hashes[gap - 2]):
                    gap -= 1
        return gap

    @property
    def first_ids(self) -> list[int]:
        """For each group, the smallest id of its blocks. Ids are unique among all pools."""
        sizes = (group.layout.num_blocks * group.num_pieces for group in self.groups)
        return list(accumulate(sizes, initial=0))[:-1]

    def global_ids(self, group: int, block_ids: Sequence[int]) -> list[int]:
        """Returns the ids among all pools of blocks that have the ids `block_ids` in the pool of
        their group. A slot has several."""
        first = self.first_ids[group]
        num_pieces = self.groups[group].num_pieces
        if num_pieces == 1:
            return [first + block_id for block_id in block_ids]
        return [
            first + block_id * num_pieces + piece
            for block_id in block_ids
            for piece in range(num_pieces)
        ]

    def locate(self, block_id: int) -> tuple[int, int]:
        """Returns a block's group and its id in the group's pool. `block_id` is its id among all
        pools, or the id of a piece of a slot. Raises ValueError for an unknown id."""
        local = block_id
        for number, group in enumerate(self.groups):
            num_ids = group.layout.num_blocks * group.num_pieces
            if 0 <= local < num_ids:
                return number, local // group.num_pieces
            local -= num_ids
        raise ValueError(f"block id is {block_id}; it must be from 0 to {self.num_blocks - 1}")

    @property
    def sizes(self) -> list[int]:
        """The number of blocks in each group's pool."""
        return [group.layout.num_blocks for group in self.groups]

    @property
    def most_blocks(self) -> int:
        """Number of blocks in the largest pool of blocks, which limits the tokens of all
        sequences."""
        return max(group.layout.num_blocks for group in self.groups if not group.has_states)

    @property
    def num_blocks(self) -> int:
        """Number of block ids. A slot has one for each of its pieces."""
        return self.spans.num_blocks

    @property
    def block_bytes(self) -> int:
        """Sum of the groups' block sizes in bytes."""
        return sum(group.layout.block_bytes for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        return sum(group.layout.pool_bytes for group in self.groups)

    @property
    def spans(self) -> BlockSpans:
        """The position in memory of each block or piece of a slot, by its id among all pools."""
        return BlockSpans(
            tuple(
                (
                    group.layout.num_blocks * group.num_pieces,
                    group.layout.block_bytes // group.num_pieces,
                )
                for group in self.groups
            )
        )

    def describe(self) -> str:
        """Returns a description that two workers compare before they exchange blocks. It leaves out
        the pools' sizes."""
        if len(self.groups) == 1 and self.groups[0].window is None:
            return self.groups[0].layout.describe()
        return " + ".join(
            f"{group.layout.describe()} of={','.join(map(str, group.layers))} "
            f"window={group.window or 'none'}"
            for group in self.groups
        )


# The rule by which a layer keeps KV: a window, None for full attention, linear attention, "entries"
# for the entries of a compressor, or the compressor for the inputs of its entries.
Rule = int | None | LinearAttention | Literal["entries"] | Compressor


def layer_groups(model: ModelConfig) -> dict[Rule, tuple[int, ...]]:
    """Returns the layer indices of each KV group. Full attention and entries come first, then
    windows, then the inputs of entries, then linear attention."""
    rules = {rule for layer in model.layers for rule in _rules(layer)}
    return {
        rule: tuple(i for i, layer in enumerate(model.layers) if rule in _rules(layer))
        for rule in sorted(rules, key=lambda rule: _order(model, rule))
    }


def _rules(layer: LayerSpec) -> tuple[Rule, ...]:
    """Returns the rule of each KV group that has the layer."""
    rules: list[Rule] = []
    if layer.has_attention and layer.kv_source is None:
        rules.append(layer.window)
    if layer.compressor is not None:
        rules += ["entries", layer.compressor]
    if layer.linear is not None:
        rules.append(layer.linear)
    return tuple(rules)


def _order(model: ModelConfig, rule: Rule) -> tuple[int, int]:
    first = next(i for i, layer in enumerate(model.layers) if rule in _rules(layer))
    if rule is None or rule == "entries":
        return 0, first
    return (1 if isinstance(rule, int) else 2 if isinstance(rule, Compressor) else 3), first


class LayerPlace(NamedTuple):
    """The KV group of a layer, and the layer's index among the layers of the group."""

    group: int
    number: int


def layer_places(model: ModelConfig) -> list[LayerPlace | None]:
    """Returns the place of each layer's keys and values, in the order of the model's layers; None
    if it has none. A layer that reads the KV of an earlier layer has the place of that layer."""
    places = _places(model, lambda rule: rule is None or isinstance(rule, int))
    return [
        places.get(number if layer.kv_source is None else layer.kv_source)
        for number, layer in enumerate(model.layers)
    ]


def state_places(model: ModelConfig) -> list[LayerPlace | None]:
    """Returns the place of each layer's state, in the order of the model's layers; None if it keeps
    no state."""
    places = _places(model, lambda rule: isinstance(rule, LinearAttention))
    return [places.get(number) for number in range(model.num_layers)]


def entry_places(model: ModelConfig) -> list[LayerPlace | None]:
    """Returns the place of each layer's entries, in the order of the model's layers; None if it has
    no compressor. The number of the place counts parts of blocks, of which a layer with an indexer
    has two (layout/row_layout.py)."""
    places: list[LayerPlace | None] = []
    number = 0
    group = next((n for n, rule in enumerate(layer_groups(model)) if rule == "entries"), 0)
    for layer in model.layers:
        places.append(LayerPlace(group, number) if layer.compressor is not None else None)
        number += 0 if layer.compressor is None else len(layer.compressor.dims)
    return places


def input_places(model: ModelConfig) -> list[LayerPlace | None]:
    """Returns the place of the inputs of each layer's entries, in the order of the model's layers;
    None if it has no compressor."""
    places = _places(model, lambda rule: isinstance(rule, Compressor))
    return [places.get(number) for number in range(model.num_layers)]


def _places(model: ModelConfig, includes: Callable[[Rule], bool]) -> dict[int, LayerPlace]:
    """Returns the places of layers in the groups whose rules are included."""
    return {
        layer: LayerPlace(group, number)
        for group, (rule, layers) in enumerate(layer_groups(model).items())
        for number, layer in enumerate(layers)
        if includes(rule)
    }


def divide_pool(
    layout: Callable[..., KvLayout], config: EngineOptions, *, step_tokens: int
) -> KvLayout:
    """Divides an engine's KV memory among the KV groups. `layout` takes the number of blocks of
    each group and returns the layout of the pools.

    The group that sees furthest (full attention or the longest window) gets the memory that the
    other groups leave. Each other group gets the blocks that `max_num_seqs` decoding sequences and
    the tokens of one step need. The limit is the number of blocks that each group would have if all
    groups had the same number. A state group gets a slot for each of `max_num_seqs` sequences, and
    slots for frozen states (state_slots). Raises ConfigError if not even one block fits.
    """
    one = layout()
    blocks = one.without_states
    sizes: dict[KvGroup, int] = {}
    state_bytes = 0
    for group in one.groups:
        if group.has_states:
            sizes[group] = _num_slots(config, group, blocks)
            state_bytes += sizes[group] * group.layout.block_bytes
    equal = num_blocks_of(config, blocks.block_bytes, state_bytes)
    left = equal * blocks.block_bytes
    if config.num_blocks is None:
        left = config.kv_bytes - state_bytes
    furthest = max(blocks.groups, key=lambda group: group.window or sys.maxsize)
    for group in blocks.groups:
        if group is not furthest and (held := one.held_blocks(group)) is not None:
            running = config.max_num_seqs * (held + 1)
            sizes[group] = min(equal, running + blocks.blocks_of(step_tokens))
            left -= sizes[group] * group.layout.block_bytes
    sizes[furthest] = left // furthest.layout.block_bytes
    return layout(*(sizes[group] for group in one.groups))


def _num_slots(config: EngineOptions, group: KvGroup, blocks: KvLayout) -> int:
    """Returns the number of slots of a state group. `blocks` has the groups with blocks.

    Each of `max_num_seqs` sequences needs a slot for its running state. The frozen states get as
    many slots as are useful (see `checkpoint_interval`) if the pools of blocks are full: one for
    every `interval` tokens, and two for the ends of prompts and answers. At most half of the memory
    is for states. Proposed tokens need a few scratch slots besides.
    """
    slot_bytes = group.layout.block_bytes
    num_scratch = num_scratch_slots(config)
    interval = checkpoint_interval(group, blocks)
    token_bytes = blocks.block_bytes / blocks.block_size
    # A slot that a tier copies cannot be evicted.
    least = _SLOTS_MIN + config.has_tiers
    if config.num_blocks is not None:
        num_tokens = config.num_blocks * blocks.block_size
        return num_scratch + max(least, 2 * config.max_num_seqs + 3 * -(-num_tokens // interval))
    left = max(0, config.kv_bytes - (config.max_num_seqs + num_scratch) * slot_bytes)
    num_tokens = int(left / (token_bytes + 3 * slot_bytes / interval))
    wanted = config.max_num_seqs + 3 * -(-num_tokens // interval)
    return max(least + num_scratch, min(wanted + num_scratch, config.kv_bytes // 2 // slot_bytes))


def num_scratch_slots(config: EngineOptions) -> int:
    """Returns how many slots of each state group are scratch slots."""
    is_off = config.speculative_config == "off" or config.state_dtype != "float32"
    return 0 if is_off else min(_SCRATCH_SLOTS, config.max_num_seqs)


def state_spacing(block_size: int) -> int:
    """Returns the number of tokens of which all positions of frozen states are multiples."""
    return lcm(INNER_CHUNK, block_size)


def checkpoint_interval(group: KvGroup, blocks: KvLayout) -> int:
    """Returns the distance in tokens at which the states of a long prompt are worth their memory, a
    power of 2 from 512 to 4,096. `blocks` has the groups with blocks.

    The distance N is the one with which a byte of memory saves the most seconds of prefill. A
    prompt has L = 8,192 tokens in common with the cached ones, and resumes after the last state in
    them. So it saves the prefill of L - N / 2 tokens on average. A state has the bytes of the KV of
    r tokens. So a cached token takes 1 + r / N times the bytes of its KV, and as many times fewer
    tokens are cached. (L - N / 2) / (1 + r / N) is largest at N = sqrt(r^2 + 2 r L) - r.

    A chunk of prefill ends at each state. Below the 512 tokens of a CPU's step, this would cost
    more steps.
    """
    state_tokens = group.layout.block_bytes * blocks.block_size / blocks.block_bytes
    best = sqrt(state_tokens**2 + 2 * state_tokens * _COMMON_TOKENS) - state_tokens
    return next((size for size in (512, 1024, 2048) if best < 2 * size), 4096)


def model_layout(
    model: ModelConfig,
    num_blocks: Sequence[int] = (),
    *,
    block_size: int,
    dtype: str,
    computed_dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> KvLayout:
    """Returns the layout of a model's pools.

    `num_blocks` has one number for each group; by default each group has one block.
    `computed_dtype` is the dtype of the rotated keys, which quantized latents need. `state_dtype`
    is the dtype of states in slots. Raises ConfigError for a dtype that the model's KV cannot have.
    """
    if why := why_not_kv_dtype(model, dtype) or why_not_block_size(model, block_size):
        raise ConfigError(why)
    rules = layer_groups(model)
    latent = model.latent

    def group(rule: Rule, layers: tuple[int, ...], size: int) -> KvGroup:
        if isinstance(rule, LinearAttention):
            states = StateLayout.of(
                rule,
                num_slots=size,
                num_layers=len(layers),
                block_size=block_size,
                dtype=state_dtype,
            )
            return KvGroup(layers, block_size + 1, states)
        sizes_of_rows = {"num_blocks": size, "block_size": block_size}
        if isinstance(rule, Compressor):
            inputs = RowLayout.of_inputs(rule, num_layers=len(layers), dtype=dtype, **sizes_of_rows)
            return KvGroup(layers, rule.num_seen, inputs)
        if rule == "entries":
            compressors = [each.compressor for each in model.layers if each.compressor is not None]
            entries = RowLayout.of_entries(compressors, dtype=dtype, **sizes_of_rows)
            return KvGroup(layers, None, entries)
        return KvGroup(
            layers,
            rule,
            BlockLayout(
                num_blocks=size,
                num_kv_heads=model.heads_of(model.layers[layers[0]]).num_kv,
                num_layers=len(layers),
                block_size=block_size,
                head_dim=model.heads_of(model.layers[layers[0]]).dim,
                dtype=dtype,
                has_values=latent is None and model.shared_kv is None,
                rotated=None if latent is None else latent.rotated_key(dtype, computed_dtype),
                index=model.index_keys,
            ),
        )

    sizes = num_blocks or [1] * len(rules)
    return KvLayout(
        tuple(group(*each, size) for each, size in zip(rules.items(), sizes, strict=True))
    )
