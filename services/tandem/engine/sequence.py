"""One sequence on an engine: its tokens, how far its KV is, and the blocks it references.

    WAITING ---admit---> RUNNING ---(finish)---> gone                 Mode.HERE
       |  ^                 |  `--(computed)---> HELD --remove--> gone  Mode.FOR_PEER
       |  '----preempt------'
       `---admit---> AWAITING_KV --commit or start_local_prefill--> RUNNING (AWAIT_KV: HERE now)
                          |------continue_prefill--> RUNNING (HERE and FOR_PEER with a prefix)
                          `------restart--> WAITING

The scheduler moves WAITING and RUNNING, the engine the rest. A WAITING sequence references no
block; every other one references all of its `block_table`, and whoever ends that state releases it.

Ranges of a running sequence (n tokens):

    [ cached | computed earlier | this step's chunk | to come  ]  token n is the next one sampled
             num_cached         num_computed_tokens            n
    [ stored blocks: hashed, shared, never written | own blocks: only this sequence writes them ]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.block_hash import block_hash, hash_blocks
from tandem.engine.types import Mode, SamplingParams, SequenceSpec


class Status(Enum):
    WAITING = "waiting"
    AWAITING_KV = "awaiting_kv"
    RUNNING = "running"
    HELD = "held"


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: str
    mode: Mode
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    remote_prefill_min_tokens: int
    arrival: int  # order of coming; kept over preemption and restart, so the oldest goes first
    block_size: int
    chain_root: bytes
    block_hashes: list[bytes]  # of the full blocks of token_ids
    num_reported_blocks: int  # FOR_PEER: the reader was told of these, or does not want them
    reader_rate: tuple[float, float] | None  # FOR_PEER: latency_s and bytes_per_s of its pulls
    num_prefix_blocks: int  # HERE, FOR_PEER: to come from a peer, if they are not cached; 0: none
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks
    num_prefill_tokens: int = 0  # tokens there were at admission; decode comes after them
    num_stored_blocks: int = 0  # the table's first blocks that the pool finds by hash
    num_cached_tokens: int | None = None  # that the first admission reused; None before it
    num_preemptions: int = 0
    pull_lag_s: float = 0.0  # FOR_PEER: predicted, of its reader's pulls behind what is computed

    @classmethod
    def from_spec(
        cls, spec: SequenceSpec, *, arrival: int, block_size: int, chain_root: bytes
    ) -> Sequence:
        num_reusable = (len(spec.token_ids) - 1) // block_size
        awaits_all = spec.mode is Mode.AWAIT_KV
        return cls(
            sequence_id=spec.sequence_id,
            mode=spec.mode,
            token_ids=list(spec.token_ids),
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=spec.sampling,
            max_tokens=spec.max_tokens,
            stop_token_ids=frozenset(spec.stop_token_ids),
            remote_prefill_min_tokens=spec.remote_prefill_min_tokens,
            arrival=arrival,
            block_size=block_size,
            chain_root=chain_root,
            block_hashes=hash_blocks(chain_root, spec.token_ids, block_size),
            num_reported_blocks=spec.first_wanted_block,
            reader_rate=spec.reader_rate,
            num_prefix_blocks=0 if awaits_all else min(spec.prefix_blocks, num_reusable),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_blocks_needed(self) -> int:
        """Blocks that hold all its tokens."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def num_final_blocks(self) -> int:
        """Blocks that will not change any more; of a sequence that decodes, only full ones."""
        if self.mode is Mode.FOR_PEER and not self.num_missing_tokens:
            return len(self.block_table)
        return self.num_computed_tokens // self.block_size

    @property
    def reusable_hashes(self) -> list[bytes]:
        """Hashes to look for at admission: at least the last token is computed, to have logits,
        and in a block of its own, because a shared one is never written."""
        return self.block_hashes[: (len(self.token_ids) - 1) // self.block_size]

    @property
    def may_await_kv(self) -> bool:
        """Whether its admission may end in AWAITING_KV."""
        return self.mode is Mode.AWAIT_KV or self.num_prefix_blocks > 0

    @property
    def lacks_kv(self) -> bool:
        """Admitted, with less cached than is to come from outside."""
        if self.mode is Mode.AWAIT_KV:
            return self.num_missing_tokens >= self.remote_prefill_min_tokens
        return self.num_prefix_blocks > self.num_stored_blocks

    @property
    def in_decode(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Prefill that this engine still has to do for it, as far as is known before admission."""
        if self.status is Status.WAITING:
            return self.num_tokens - self.num_prefix_blocks * self.block_size
        if self.status is Status.AWAITING_KV and self.mode is not Mode.AWAIT_KV:
            return self.num_tokens - self.num_prefix_blocks * self.block_size
        if self.status is Status.RUNNING and not self.in_decode:
            return self.num_missing_tokens
        return 0

    @property
    def num_made_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if len(self.token_ids) % self.block_size == 0:
            parent = self.block_hashes[-1] if self.block_hashes else self.chain_root
            self.block_hashes.append(block_hash(parent, self.token_ids[-self.block_size :]))

    def finish_reason(self, max_model_len: int) -> str:
        """Why it is over after its last token; empty when it goes on."""
        if self.num_made_tokens and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        if self.num_made_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return ""

    def hold(self, block_table: list[int], num_cached_blocks: int) -> None:
        """It was admitted with blocks for all its tokens; the first ones have their KV."""
        self.block_table = block_table
        self.num_stored_blocks = num_cached_blocks
        self.num_computed_tokens = num_cached_blocks * self.block_size
        self.num_prefill_tokens = len(self.token_ids)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = self._countable(self.num_computed_tokens)

    def take_prefix(self, num_blocks: int) -> None:
        """The KV of its first `num_blocks` blocks is in place: some of it came from a peer."""
        came = num_blocks - self.num_stored_blocks
        self.num_computed_tokens = num_blocks * self.block_size
        if came:
            self.num_cached_tokens = self._countable(self.num_computed_tokens)

    def await_nothing(self) -> None:
        """What it has now is all that comes from outside; what is missing is computed here."""
        if self.mode is Mode.AWAIT_KV:
            self.mode = Mode.HERE
        self.num_prefix_blocks = 0

    def _countable(self, num_tokens: int) -> int:
        """Of its first tokens, those that count as reused."""
        most = self.num_tokens if self.mode is Mode.FOR_PEER else self.num_prompt_tokens
        return min(num_tokens, most)

    def let_go(self) -> list[int]:
        """It holds nothing any more; answers the blocks to release."""
        block_table, self.block_table = self.block_table, []
        self.num_computed_tokens = self.num_stored_blocks = 0
        return block_table
