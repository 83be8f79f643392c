"""KV groups: layers that keep KV by one rule have one pool, and a sequence one block table for it.

A rule is a sliding window, or none (full attention). All pools lie in one span of memory, and a
block's id is unique among them: the ids of a group follow those of the group before.

    ids      [ group 0: 0 .. n0 - 1 | group 1: n0 .. n0 + n1 - 1 | ... ]
    memory   [ pool of group 0      | pool of group 1            | ... ]

Most models have one group, whose ids are the blocks of its pool. It stands on no tensor library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.engine.cache.layout import BlockLayout
from tandem.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one rule, and the layout of their pool."""

    layers: tuple[int, ...]  # of the model, in their order
    window: int | None  # tokens that a token sees, itself the last; None: all before it
    layout: BlockLayout


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The pools of a model's groups. There is at least one group."""

    groups: tuple[KvGroup, ...]

    @classmethod
    def of_one(cls, layout: BlockLayout) -> KvLayout:
        """Returns the layout of a model whose layers are one group without a window."""
        return cls((KvGroup(tuple(range(layout.num_layers)), None, layout),))

    @property
    def block_size(self) -> int:
        """Tokens in a block, the same in all groups."""
        return self.groups[0].layout.block_size

    @property
    def num_blocks(self) -> int:
        return sum(group.layout.num_blocks for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all layers: one of each group."""
        return sum(group.layout.block_bytes for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        return sum(group.layout.pool_bytes for group in self.groups)

    def describe(self) -> str:
        """Returns the layout's part of the KV compatibility (not the pools' sizes)."""
        if len(self.groups) == 1 and self.groups[0].window is None:
            return self.groups[0].layout.describe()
        return " + ".join(
            f"{group.layout.describe()} of={','.join(map(str, group.layers))} "
            f"window={group.window or 'none'}"
            for group in self.groups
        )


def layer_groups(model: ModelConfig) -> dict[int | None, tuple[int, ...]]:
    """Returns the layers of each group by the group's window."""
    return {None: tuple(range(model.num_layers))}


class LayerPlace(NamedTuple):
    """The place of a layer's KV."""

    group: int
    number: int  # of the layer among those of its group


def layer_places(model: ModelConfig) -> list[LayerPlace]:
    """Returns the place of each layer."""
    places = {
        layer: LayerPlace(group, number)
        for group, layers in enumerate(layer_groups(model).values())
        for number, layer in enumerate(layers)
    }
    return [places[layer] for layer in range(model.num_layers)]


def model_layout(
    model: ModelConfig, num_blocks: Sequence[int] = (), *, block_size: int, dtype: str
) -> KvLayout:
    """Returns the layout of a model's pools: an engine's own, and that which is only computed.

    `num_blocks` are of each group; by default one.
    """
    rules = layer_groups(model)
    groups = (
        KvGroup(
            layers,
            window,
            BlockLayout(
                num_blocks=size,
                num_kv_heads=model.num_kv_heads,
                num_layers=len(layers),
                block_size=block_size,
                head_dim=model.head_dim,
                dtype=dtype,
            ),
        )
        for (window, layers), size in zip(
            rules.items(), num_blocks or [1] * len(rules), strict=True
        )
    )
    return KvLayout(tuple(groups))
