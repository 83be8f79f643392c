"""A ToyRunner with one KV group for each of several windows, whose blocks differ in size, and the
oracle of its tokens.

A token's KV in a group is a digest of the token and of the KV that its window in that group
includes. In a state group, it is a digest of the token and of the state, and becomes the state.
Tokens depend on the KV of all groups, so an error in any group changes all later tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.kv_budget import KvBudget, VisibleKeys
from tandem.engine.cache.checkpoints import Checkpoints
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.engine.engine import Engine
from tandem.engine.scheduler.batch import SequenceSlice
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.models.config.linear_attention import GatedDelta
from tests.toy_runner import ToyRunner, attend, logits_of

STATE = "state"
Windows = tuple[int | Literal["state"] | None, ...]  # "state": a state group; these come last
_DELTA = GatedDelta(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=2, kernel=2)


@dataclass(frozen=True, slots=True)
class StatesInTwoPieces(StateLayout):
    """A slot of two parts, each of which is transferred as a piece."""

    @property
    def num_pieces(self) -> int:
        return 2


def seen_before(position: int, window: int | None, visible: VisibleKeys | None) -> list[int]:
    """Lists the earlier positions that a token attends to in a group with this window."""
    if window is not None:
        return list(range(max(0, position + 1 - window), position))
    num_first, num_last = visible or (position, 1)
    return [j for j in range(position) if j < num_first or j > position - num_last]


def group_values(
    token_ids: Sequence[int],
    window: int | Literal["state"] | None,
    visible: VisibleKeys | None = None,
) -> list[int]:
    """Computes the KV of the tokens in one group, or the states after them."""
    values: list[int] = []
    for position, token_id in enumerate(token_ids):
        if window == STATE:
            values.append(attend(values[-1:], token_id))
            continue
        seen = seen_before(position, window, visible)
        values.append(attend([values[j] for j in seen], token_id))
    return values


def token_after(
    token_ids: Sequence[int], windows: Windows, visible: VisibleKeys | None = None
) -> int:
    values = [group_values(token_ids, window, visible)[-1] for window in windows]
    return int(logits_of(_mixed(values)).argmax())


def continuation(
    token_ids: Sequence[int],
    num_tokens: int,
    windows: Windows,
    stop_token_ids: Collection[int] = (),
    budget: KvBudget | None = None,
) -> list[int]:
    """Computes the greedy tokens that follow, up to `num_tokens` or a stop token, which is
    included."""
    made: list[int] = []
    visible = budget.visible if budget is not None else None
    while len(made) < num_tokens and not (made and made[-1] in stop_token_ids):
        made.append(token_after([*token_ids, *made], windows, visible))
    return made


class GroupedToyRunner(ToyRunner):
    why_no_budgets = ""
    why_no_speculation = ""
    draft = None

    def __init__(
        self,
        windows: Windows,
        *,
        block_size: int,
        max_model_len: int = 1000,
        kv_dtype: str = "float32",
    ) -> None:
        """Blocks have the size of `kv_dtype`, and the KV is in their last bytes."""
        super().__init__(block_size=block_size, max_model_len=max_model_len)
        self.windows = windows
        if STATE in windows:
            self.why_no_budgets = "the toy has states"
        self.kv_dtype_name = kv_dtype

    def layout(self, *num_blocks: int) -> KvLayout:
        sizes = num_blocks or [1] * len(self.windows)
        return KvLayout(
            tuple(
                self._group(number, *each)
                for number, each in enumerate(zip(self.windows, sizes, strict=True))
            )
        )

    def _group(
        self, number: int, window: int | Literal["state"] | None, num_blocks: int
    ) -> KvGroup:
        layers = tuple(range(10 * number, 11 * number + 1))
        if window == STATE:
            states = StatesInTwoPieces.of(
                _DELTA, num_slots=num_blocks, num_layers=2, block_size=self.block_size
            )
            return KvGroup(layers, self.block_size + 1, states)
        layout = BlockLayout(num_blocks, 1, number + 1, self.block_size, 1, self.kv_dtype_name)
        return KvGroup(layers, window, layout)

    def allocate(self, *num_blocks: int) -> None:
        layout = self.layout(*num_blocks)
        size = 2 * self.block_size
        self.kv = torch.full((layout.pool_bytes // 4,), -1.0)
        parts = torch.split(self.kv, [group.layout.pool_bytes // 4 for group in layout.groups])
        self.pools = [
            part.view(num, -1)[:, :2]
            if window == STATE
            else part.view(num, -1)[:, -size:].unflatten(1, (2, self.block_size))
            for part, num, window in zip(parts, num_blocks, self.windows, strict=True)
        ]

    def blocks(self, group: int, block_ids: Sequence[int]) -> list[list[int]]:
        """Reads the KV of blocks from a group's pool."""
        halves = self.pools[group][list(block_ids)].transpose(1, 2).long()
        return [[(high << 16) + low for high, low in block] for block in halves.tolist()]

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, group in copies:
            self.pools[group][target] = self.pools[group][source]

    def block(self, layout: KvLayout, block_id: int) -> torch.Tensor:
        """Finds a block by its id among all pools."""
        group, local = layout.locate(block_id)
        return self.pools[group][local]

    def _compute(self, piece: SequenceSlice) -> list[int]:
        start = piece.context_len - piece.num_tokens
        values = []
        for position, token_id in enumerate(piece.token_ids, start):
            of_groups = []
            for pool, table, window in zip(
                self.pools, piece.block_tables, self.windows, strict=True
            ):
                if window == STATE:
                    of_groups.append(self._advance_state(pool[table[0]], position, token_id))
                    continue
                places = seen_before(position, window, piece.visible)
                seen = [self._get(pool, table, place) for place in places]
                of_groups.append(attend(seen, token_id))
                block, offset = self._slot(table, position)
                pool[block, :, offset] = torch.tensor(
                    [of_groups[-1] >> 16, of_groups[-1] & 0xFFFF]
                ).float()
            values.append(_mixed(of_groups))
        return values

    def _advance_state(self, slot: torch.Tensor, position: int, token_id: int) -> int:
        high, low = slot.long().tolist()
        value = attend([(high << 16) + low] if position else [], token_id)
        slot[:] = torch.tensor([value >> 16, value & 0xFFFF]).float()
        return value

    def _get(self, pool: torch.Tensor, table: Sequence[int], position: int) -> int:
        block, offset = self._slot(table, position)
        high, low = pool[block, :, offset].long().tolist()
        return int((high << 16) + low)

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        block = table[position // self.block_size]
        assert block >= 0, f"position {position} is read, and its block was given back"
        return block, position % self.block_size


def make_grouped_engine(
    windows: Windows,
    *,
    num_blocks: int | None,
    block_size: int = 4,
    max_model_len: int = 1000,
    kv_dtype: str = "float32",
    start_thread: Callable[[str], JobThread] = IoThread,
    **settings: Any,
) -> tuple[Engine, GroupedToyRunner]:
    settings.setdefault("kv_tier_policy", "lru")  # tiers store all blocks
    runner = GroupedToyRunner(
        windows, block_size=block_size, max_model_len=max_model_len, kv_dtype=kv_dtype
    )
    config = EngineConfig(
        model="toy", block_size=block_size, num_blocks=num_blocks, itl_target_s=0.0, **settings
    )
    engine = Engine(config, runner, "toy", start_thread=start_thread)
    if STATE in windows:  # the states of short sequences are frozen, too
        engine._new_sequences._checkpoints = Checkpoints(block_size, 2 * block_size)
    return engine, runner


def _mixed(values: Sequence[int]) -> int:
    return zlib.crc32(str(list(values)).encode()) >> 1
