"""A runner whose model is a hash function and whose KV is stored in a real pool: an oracle for
block tables.

The KV of a token is a digest of the token and of all previous KV, read back from the pool, and
determines the logits. A missed write, a wrong block, or a block that is freed while in use or
written by two owners changes all later tokens. `continuation` computes the same without a pool.

With `launches_ahead`, the runner works like a device: it computes nothing before someone waits, and
then only what was started before the awaited result. `fill` and `scribble` write at once, as a peer
does. So a block that is given to a peer while a launched step uses it changes tokens.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import torch

from tandem.common.adapter import Adapter
from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import ConfigError
from tandem_kernels.logprobs import logprobs
from tandem_kernels.sampling import Draw, sample

VOCABULARY = 16


def attend(values: list[int], token_id: int) -> int:
    """Computes the KV (31 bits) of a token that follows tokens with these KVs."""
    return zlib.crc32(f"{values},{token_id}".encode()) >> 1


@lru_cache(maxsize=1 << 16)
def logits_of(value: int) -> torch.Tensor:
    """Computes logits [VOCABULARY] in fp32 from the last token's KV."""
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(value))


def kv_of(token_ids: list[int]) -> list[int]:
    values: list[int] = []
    for token_id in token_ids:
        values.append(attend(values, token_id))
    return values


def continuation(
    token_ids: list[int], num_tokens: int, stop_token_ids: Collection[int] = ()
) -> list[int]:
    """Computes the greedy tokens that follow, up to `num_tokens` or a stop token, which is
    included."""
    values = kv_of(token_ids)
    made: list[int] = []
    while len(made) < num_tokens and not (made and made[-1] in stop_token_ids):
        made.append(int(logits_of(values[-1]).argmax()))
        values.append(attend(values, made[-1]))
    return made


class ToyTokens:
    """The tokens of a sampling in a stream of work."""

    def __init__(self, stream: deque[Callable[[], None]]) -> None:
        self._stream = stream
        self.token_ids: list[int] | None = None

    def wait(self) -> list[int]:
        """Computes the stream up to this sampling, and nothing after it."""
        while self.token_ids is None:
            self._stream.popleft()()
        return self.token_ids


class ToyRunner:
    """Replaces `tandem.engine.engine.Runner`, with a pool of one head and one fp32 layer."""

    dtype_name = "float32"
    numerics_name = "fast"
    kernels_name = "toy"
    num_pools = 1
    kv_dtype_name = "float32"
    tokens_per_step = 512
    why_no_budgets = "the toy sees all tokens"
    why_no_speculation = ""
    draft: ToyRunner | None = None
    vocab_size = 1 << 31  # vocabulary of prompts; generated tokens are within VOCABULARY
    launches_ahead = False
    shards_logits = False

    def __init__(self, *, block_size: int, max_model_len: int = 1000) -> None:
        self._stream: deque[Callable[[], None]] = deque()  # started and not computed yet
        self._drawn: list[int] = []
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.adapters: set[str] = set()

    def layout(self, num_blocks: int = 1) -> KvLayout:
        pool = BlockLayout(
            num_blocks=num_blocks,
            num_kv_heads=1,
            num_layers=1,
            block_size=self.block_size,
            head_dim=1,
            dtype="float32",
        )
        return KvLayout.of_one(pool)

    def with_pool_size(self, config: EngineConfig, step_tokens: int) -> EngineConfig:
        return config

    def allocate(self, num_blocks: int) -> None:
        self.kv = torch.full((num_blocks, 1, 1, 2, self.block_size, 1), -1.0)

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._start(lambda: self._copy(copies))

    def store_states(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self.copy_blocks(copies)

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, target, _ in copies:
            self.kv[target] = self.kv[source]

    def _start(self, work: Callable[[], None]) -> None:
        self._stream.append(work)
        if not self.launches_ahead:
            self.synchronize()

    def synchronize(self) -> None:
        """Computes everything that was started."""
        while self._stream:
            self._stream.popleft()()

    def load_adapter(self, adapter: Adapter) -> str:
        """Raises ConfigError for an adapter without a folder."""
        if not adapter.path:
            raise ConfigError("it has no folder")
        return adapter.digest

    def add_adapter(self, loaded: str) -> None:
        self.adapters.add(loaded)

    def drop_adapter(self, digest: str) -> None:
        self.adapters.remove(digest)

    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> ToyTokens:
        """Samples like Runner.start_sampling."""
        tokens = ToyTokens(self._stream)

        def draw() -> None:
            self._drawn = sample(logits if rows is None else logits[rows], draws)
            tokens.token_ids = self._drawn

        self._start(draw)
        return tokens

    logprobs = staticmethod(logprobs)

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """The values from which rows of the last step's logits were computed."""
        return [[float(self._wanted[row])] for row in rows]

    def forward(self, batch: StepBatch, on_kv_written: Callable[[], object] | None) -> torch.Tensor:
        logits = torch.empty(sum(piece.num_logits for piece in batch.slices), VOCABULARY)
        pieces = [
            piece._replace(
                block_table=[*piece.block_table],
                other_tables=[[*table] for table in piece.other_tables],
            )
            for piece in batch.slices
        ]

        def compute() -> None:
            step = StepBatch(pieces)
            wanted: list[int] = []
            for piece in step.with_tokens(self._drawn).slices if batch.is_ahead else pieces:
                assert not piece.adapter or piece.adapter in self.adapters
                values = self._compute(piece)
                wanted += values[len(values) - piece.num_logits :]
            self._wanted = wanted
            for row, kv in zip(logits, wanted, strict=True):
                row[:] = logits_of(kv)

        self._start(compute)
        if on_kv_written is not None:
            self.synchronize()
            on_kv_written()
        return logits

    def fill(self, block_table: list[int], token_ids: list[int], first_block: int) -> None:
        """Writes the KV that a pull of the blocks from `first_block` on would have written."""
        for position, value in enumerate(kv_of(token_ids)):
            if position >= first_block * self.block_size:
                self._put(block_table, position, value)

    def scribble(self, block_ids: list[int]) -> None:
        """Overwrites unused blocks, like a late read."""
        self.kv[block_ids] = -2.0

    def read(self, block_table: list[int], num_tokens: int) -> list[int]:
        """Reads the KV of the first `num_tokens` positions."""
        halves = self.kv[block_table, 0, 0].transpose(1, 2).reshape(-1, 2)[:num_tokens].long()
        return [(high << 16) + low for high, low in halves.tolist()]

    def _compute(self, piece: SequenceSlice) -> list[int]:
        assert len(piece.block_table) * self.block_size >= piece.context_len
        start = piece.context_len - piece.num_tokens
        values = []
        for position, token_id in enumerate(piece.token_ids, start):
            value = attend(self.read(piece.block_table, position), token_id)
            self._put(piece.block_table, position, value)
            values.append(value)
        return values

    def _put(self, block_table: list[int], position: int, value: int) -> None:
        block = self.kv[block_table[position // self.block_size], 0, 0, :, :, 0]
        block[:, position % self.block_size] = torch.tensor([value >> 16, value & 0xFFFF]).float()
