"""One sequence of an engine: its tokens, the progress of its KV, and the blocks that it references.

    WAITING ---admit---> RUNNING ---(finish)---> removed                 Mode.LOCAL
       |  ^                 |  `--(computed)---> HELD --remove--> removed  Mode.PREFILL_ONLY
       |  '----preempt------'
       |---admit---> LOADING --load ended--> RUNNING or WAITING_FOR_KV
       |              (it may compute its first blocks meanwhile; then it is RUNNING next)
       |                 `--stalled--> WAITING, and never LOADING again
       `---admit---> WAITING_FOR_KV --commit or start_local_prefill--> RUNNING
                          |           (WAITING_FOR_REMOTE_KV becomes LOCAL)
                          |------continue_prefill--> RUNNING (LOCAL and PREFILL_ONLY with a prefix)
                          `------restart--> WAITING  (also a sequence of a model with windows that
                                                      did not get all the KV that it awaited)

The scheduler moves sequences between WAITING and RUNNING; the engine makes all other transitions. A
WAITING sequence references no block. Every other sequence references all blocks in its `tables`,
and the transition that ends its state releases them.

Ranges of a running sequence (n tokens):

    [ cached | computed earlier | this step's chunk | missing  ]  token n is the next one sampled
             num_cached         num_computed_tokens            n
    [ stored blocks: hashed, shared, never written | own blocks: only this sequence writes them ]

A fork shares its parent's stored blocks, as any sequence does, and gets a copy of the next block.
Only its last token is missing in this copy:

    parent [ stored | partly filled: 5 of 8 tokens ]
    fork   [ shared | its own copy, 4 of its 5 tokens computed ]

A sequence that differs from a cached chain in the middle of a block gets a copy of that block, and
continues after the tokens that both have:

    chain    [ stored | a b c d e f g h | ... ]
    sequence [ shared | a b c copied; u v w missing ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.common.block_hash import block_hash, hash_blocks
from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.engine.cache.block_copy import NO_PART, BlockCopy, BlockPart
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.logit_edits import LogitEdits
from tandem.engine.types import Mode, SequenceSpec, TokenLogprobs
from tandem.models.grammars.masks import GrammarMatcher


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    WAITING_FOR_KV = "awaiting_kv"
    RUNNING = "running"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Admission:
    """How a sequence starts: the blocks that it reuses, and the position at which it continues."""

    num_cached_blocks: int
    num_computed_tokens: int
    resume: int  # once no KV is awaited, the sequence continues with the token after this many
    # Block ids, one per KV group, that are copied into the sequence's first own block of the group.
    sources: tuple[int, ...]
    is_fork: bool


@dataclass(slots=True)
class Loading:
    """The blocks of one sequence that are loaded from a tier below the pool.

    [ stored | computed meanwhile, or loaded | computed later ]
             ^ num_stored_blocks              end
    [ stored, computed | could not be loaded | loaded | computed later ]      a load that failed
    """

    end: int = 0  # LOADING: number of the sequence's first blocks that are present after the load
    computes: bool = False  # LOADING: the first of these blocks are computed during the load
    num_spared: int = 0  # number of blocks of the load that are expected to be computed instead
    awaits: bool = True  # LOADING: the blocks after `end` may come from a peer
    loaded: range = range(0)  # blocks that are loaded and not yet reached by computation

    def take(self, first: int, end: int) -> None:
        """Ends the load: blocks first..end - 1 are filled."""
        self.end = 0
        self.computes = False
        self.loaded = range(first, end)

    def skip(self, num_blocks: int) -> int:
        """Returns the number of leading blocks that have KV if `num_blocks` are computed. Loaded
        blocks that directly follow them count too."""
        if self.loaded and num_blocks >= self.loaded.start:
            num_blocks = max(num_blocks, self.loaded.stop)
            self.loaded = range(0)
        return num_blocks


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: str
    spec: SequenceSpec
    # The spec's mode; WAITING_FOR_REMOTE_KV becomes LOCAL when no KV is awaited any more.
    mode: Mode
    token_ids: list[int]
    # Order of arrival. It survives preemption and restart, so the oldest sequence goes first.
    arrival: int
    block_size: int
    chain_root: bytes
    block_hashes: list[bytes]  # one hash for each full block of token_ids
    num_reported_blocks: int  # PREFILL_ONLY: blocks that the consumer knows of or does not want
    next_in_transfer: int  # PREFILL_ONLY: index of the next block to report, in transfer order
    # LOCAL, PREFILL_ONLY: number of first blocks to pull from a peer if not cached; 0: none.
    num_prefix_blocks: int
    status: Status = Status.WAITING
    tables: BlockTables = field(default_factory=BlockTables)
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks
    num_prefill_tokens: int = 0  # tokens at admission; decode starts after them
    num_stored_blocks: int = 0  # leading blocks of the table that the pool finds by their hash
    num_used_blocks: int = 0  # stored blocks that `take_used` has returned already
    cached: CachedTokens | None = None  # tokens that the first admission reused; None before it
    loading: Loading = field(default_factory=Loading)  # the load from a tier below the pool
    # Leading blocks known from other sequences, maybe without all that windows need.
    num_known_blocks: int = 0
    num_matched_blocks: int = 0  # WAITING: leading blocks that were cached when it was enqueued
    is_begun: bool = False  # this engine has computed a part of the sequence
    has_waited: bool = False  # it did not start in the first step after its arrival
    may_load: bool = True  # loading from a tier is allowed; False after a load stalled
    num_preemptions: int = 0
    # WAITING: when it began to wait for blocks of another sequence (early_reuse.py); 0: never.
    shared_since: float = 0.0
    shared_wait_s: float = 0.0  # total time of these waits
    is_forked: bool = False  # admitted as a fork: only its last token is missing
    # PREFILL_ONLY: predicted time by which the consumer's pulls lag behind the computation.
    pull_lag_s: float = 0.0
    edits: LogitEdits | None = None  # edits of the next token's logits; None: no edits
    # Log probabilities of the prompt's tokens computed so far.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Embedding of the prompt, until it is reported.
    embedding: list[float] = field(default_factory=list)

    @classmethod
    def from_spec(
        cls, spec: SequenceSpec, *, arrival: int, block_size: int, chain_root: bytes
    ) -> Sequence:
        num_reusable = 0 if spec.kv_budget else (len(spec.token_ids) - 1) // block_size
        takes_none = spec.mode is Mode.WAITING_FOR_REMOTE_KV or (
            spec.sampling.prompt_logprobs is not None
        )
        return cls(
            sequence_id=spec.sequence_id,
            spec=spec,
            mode=spec.mode,
            token_ids=list(spec.token_ids),
            arrival=arrival,
            block_size=block_size,
            chain_root=chain_root,
            block_hashes=hash_blocks(chain_root, spec.token_ids, block_size),
            num_reported_blocks=spec.first_wanted_block,
            next_in_transfer=spec.first_wanted_block,
            num_prefix_blocks=0 if takes_none else min(spec.prefix_blocks, num_reusable),
        )

    @property
    def grammar(self) -> GrammarMatcher | None:
        """Position of the completion in its grammar; None if it has no grammar."""
        return None if self.edits is None else self.edits.grammar

    @property
    def awaits_grammar(self) -> bool:
        """True while the grammar is being compiled. The sequence is not admitted before that
        ends."""
        return self.grammar is not None and not self.grammar.is_compiled

    @property
    def awaits_mask(self) -> bool:
        """True while the mask of the next token is being made. The sequence is in no step then."""
        return self.grammar is not None and self.grammar.is_late

    @property
    def needs_mask_first(self) -> bool:
        """True if the last token may be computed only once the mask of the next token is ready.

        A late mask causes the last token to be computed again, and a KV budget would count its
        attention twice.
        """
        if self.grammar is None or self.grammar.update_job is not None:
            return False
        return self.grammar.is_slow or self.spec.kv_budget is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_tokens(self, index: int) -> list[int]:
        """Returns the token ids of a block; the last block may have fewer than `block_size`."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    @property
    def num_missing_tokens(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def block_table(self) -> list[int]:
        """Block table of the first KV group; empty while the sequence is WAITING."""
        ids = self.tables.ids
        return ids[0] if ids else []

    @property
    def num_next_tokens(self) -> int:
        """Number of tokens that the next chunk may have: it ends before a loaded block or at an
        eviction point."""
        if hitters := self.tables.hitters:
            return min(
                self.num_missing_tokens, hitters.num_until_eviction(self.num_computed_tokens)
            )
        if loaded := self.loading.loaded:
            return loaded.start * self.block_size - self.num_computed_tokens
        return self.num_missing_tokens

    @property
    def num_final_blocks(self) -> int:
        """Number of blocks that will not change any more. For a decoding sequence only full blocks
        count."""
        if self.tables.hitters is not None and self.status is not Status.HELD:
            return 0  # any block may still be evicted
        if self.mode is Mode.PREFILL_ONLY and not self.num_missing_tokens:
            return self.tables.num_full(self.num_tokens)
        return self.num_computed_tokens // self.block_size

    @property
    def last_depth(self) -> int:
        """Number of full blocks before the last token, which is the most that a sequence of the
        same tokens can reuse. A transfer to a peer therefore covers the blocks that the token at
        this depth sees."""
        return (len(self.token_ids) - 1) // self.block_size

    @property
    def earliest_next_token(self) -> int:
        """Index of the earliest token that will still attend to this KV, on this engine or the
        consumer's."""
        if self.mode is not Mode.PREFILL_ONLY:
            return self.num_computed_tokens
        return min(self.num_computed_tokens, self.last_depth * self.block_size)

    @property
    def reusable_hashes(self) -> list[bytes]:
        """Hashes of the blocks to look for at admission.

        At least the last token is computed, because its logits are needed, and in an own block,
        because shared blocks are never written.
        """
        return [] if self.wants_prompt_logits else self.block_hashes[: self.last_depth]

    @property
    def wants_prompt_logits(self) -> bool:
        """True while log probabilities of the prompt are still to be computed.

        They cover all tokens but the first, and are computed once, before the first output token.
        """
        return (
            self.spec.sampling.prompt_logprobs is not None
            and len(self.token_ids) == self.spec.num_prompt_tokens
            and len(self.prompt_logprobs) < self.spec.num_prompt_tokens - 1
        )

    @property
    def wants_embedding(self) -> bool:
        """True before the first output token of a sequence whose prompt is to be embedded."""
        return self.spec.embed and len(self.token_ids) == self.spec.num_prompt_tokens

    @property
    def may_wait_for_remote_kv(self) -> bool:
        """True if admission may move the sequence to WAITING_FOR_KV."""
        return self.mode is Mode.WAITING_FOR_REMOTE_KV or self.num_prefix_blocks > 0

    @property
    def lacks_kv(self) -> bool:
        """True if the sequence was admitted with fewer cached blocks than it awaits from a peer."""
        if self.is_forked:
            return False
        if self.mode is Mode.WAITING_FOR_REMOTE_KV:
            return self.num_missing_tokens >= self.spec.remote_prefill_min_tokens
        return self.num_prefix_blocks > self.num_stored_blocks

    @property
    def in_decode(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def missing_span(self) -> tuple[int, int]:
        """Prefill that this engine has left for the sequence, as (number of tokens, tokens before
        them).

        Before admission this is an estimate.
        """
        awaits_prefix = (
            self.status is Status.WAITING_FOR_KV and self.mode is not Mode.WAITING_FOR_REMOTE_KV
        )
        if self.status is Status.LOADING:
            context = self.loading.end * self.block_size
        elif self.status is Status.WAITING or awaits_prefix:
            num_blocks = max(self.num_prefix_blocks, self.num_matched_blocks)
            context = num_blocks * self.block_size
        elif self.status is Status.RUNNING and not self.in_decode:
            context = self.num_computed_tokens
        else:
            return 0, 0
        return self.num_tokens - context, context

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.edits is not None:
            self.edits.append(token_id)
        if len(self.token_ids) % self.block_size == 0:
            parent = self.block_hashes[-1] if self.block_hashes else self.chain_root
            self.block_hashes.append(block_hash(parent, self.token_ids[-self.block_size :]))

    def append_drawn(self, token_id: int, max_model_len: int, forced_max: int) -> list[int]:
        """Appends a sampled token and at most `forced_max` tokens that its grammar forces after it.

        Returns all appended tokens. None follows a token that ends the sequence.
        """
        self.append(token_id)
        new = [token_id]
        edits = self.edits
        wants_logprobs = self.spec.sampling.logprobs is not None
        # Each reported log probability needs the model's logits, and forced tokens have none.
        if edits is None or wants_logprobs:
            return new
        while len(new) <= forced_max:
            if finish_reason(self.spec, self.token_ids, max_model_len):
                break
            if (forced := edits.find_forced()) is None:
                break
            self.append(forced)
            new.append(forced)
        return new

    def reusable_part(self, num_blocks: int) -> tuple[bytes, list[int]]:
        """Returns the hash of block `num_blocks` - 1, and the tokens after it that a copied block
        may have.

        At least the sequence's last token is left to compute.
        """
        if self.wants_prompt_logits:
            return b"", []
        parent_hash = self.block_hashes[num_blocks - 1] if num_blocks else self.chain_root
        wanted = self.block_tokens(num_blocks)
        return parent_hash, wanted[:-1] if num_blocks == self.last_depth else wanted

    def plan(
        self, num_cached_blocks: int, parent: Sequence | None = None, part: BlockPart | None = None
    ) -> Admission:
        """Returns the admission of the sequence with `num_cached_blocks` blocks cached and a copied
        `part` of the next one.

        A sequence that awaits KV from a peer copies no part, because the peer sends whole blocks.
        """
        start = num_cached_blocks * self.block_size
        fork = parent and self.fork_part(parent, num_cached_blocks)
        part = fork or part or NO_PART
        num_computed = start + part.num_tokens
        resume = num_computed
        awaits = False
        if self.mode is Mode.PREFILL_ONLY:
            resume = min(resume, self.last_depth * self.block_size)
        if fork is None and self.mode is Mode.WAITING_FOR_REMOTE_KV:
            if self.num_tokens - num_computed >= self.spec.remote_prefill_min_tokens:
                resume = self.last_depth * self.block_size
                awaits = True
        elif fork is None and self.num_prefix_blocks > num_cached_blocks:
            resume = self.num_prefix_blocks * self.block_size
            awaits = True
        if awaits:
            num_computed = start
            part = NO_PART
        return Admission(num_cached_blocks, num_computed, resume, part.sources, fork is not None)

    def hold(self, tables: BlockTables, admission: Admission) -> list[BlockCopy]:
        """Takes the block tables at admission. Returns the copies that fill the copied part of a
        block."""
        self.tables = tables
        self.num_stored_blocks = num_blocks = admission.num_cached_blocks
        self.num_computed_tokens = admission.num_computed_tokens
        self.num_prefill_tokens = len(self.token_ids)
        self.is_forked = admission.is_fork
        if self.cached is None and not self.loading.end:
            self.cached = self._countable(CachedTokens(device=self.num_computed_tokens))
        return [
            BlockCopy(source, tables.ids[group][num_blocks], group)
            for group, source in enumerate(admission.sources)
            if num_blocks >= tables.firsts[group]
        ]

    def fork_part(self, parent: Sequence, num_blocks: int) -> BlockPart | None:
        """Returns the part of a parent's block from which this sequence can fork, or None.

        The part holds all tokens after the `num_blocks` shared blocks except this sequence's last
        token.
        """
        start = num_blocks * self.block_size
        end = self.num_tokens - 1
        can_fork = (
            end - start <= self.block_size
            and all(first <= num_blocks for first in parent.tables.firsts)
            and end <= parent.num_computed_tokens
            and not self.wants_prompt_logits
            and self.chain_root == parent.chain_root
            and self.block_hashes[:num_blocks] == parent.block_hashes[:num_blocks]
            and self.token_ids[start:end] == parent.token_ids[start:end]
        )
        if not can_fork:
            return None
        sources = tuple(ids[num_blocks] for ids in parent.tables.ids) if end > start else ()
        return BlockPart(end - start, sources)

    def take_prefix(self, num_blocks: int) -> None:
        """Records that the KV of the first `num_blocks` blocks is filled, in part from a peer."""
        num_stored_tokens = self.num_stored_blocks * self.block_size
        self.num_computed_tokens = num_blocks * self.block_size
        if self.num_computed_tokens > num_stored_tokens:
            reused = (self.cached or NONE_CACHED).first(num_stored_tokens)
            reused = reused.then(CachedTokens(device=num_stored_tokens))
            self.cached = self._countable(reused.then(CachedTokens(peer=self.num_computed_tokens)))
        self.advance(0)

    def take_loaded(self, blocks: range, num_cached: int, by_tier: Mapping[str, int]) -> None:
        """Records that the KV of `blocks` was loaded.

        `num_cached` blocks were cached at admission. `by_tier` has the number of blocks loaded from
        each tier.
        """
        self.loading.take(blocks.start, blocks.stop)
        self.advance(0)
        if self.cached is None:
            loaded = {name: num * self.block_size for name, num in by_tier.items()}
            device = num_cached * self.block_size
            self.cached = self._countable(CachedTokens(device=device, **loaded))

    def advance(self, num_tokens: int) -> None:
        """Records that the KV of `num_tokens` more tokens is in the pool. Loaded blocks that follow
        count too."""
        self.num_computed_tokens += num_tokens
        if self.loading.loaded:
            num_blocks = self.num_computed_tokens // self.block_size
            if (reached := self.loading.skip(num_blocks)) > num_blocks:
                self.num_computed_tokens = reached * self.block_size

    def store_full_blocks(self, kv: KvCache) -> None:
        """Caches the blocks that became full. A block that is cached already replaces the
        sequence's own."""
        num_full_blocks = self.num_computed_tokens // self.block_size
        if self.spec.kv_budget is None and num_full_blocks > self.num_stored_blocks:
            kv.store(
                self.tables,
                self.block_hashes,
                chain_root=self.chain_root,
                first=self.num_stored_blocks,
                last=num_full_blocks,
                block_tokens=self.block_tokens,
                adapter=self.spec.adapter,
                resumable=(self.spec.num_prompt_tokens // self.block_size, self.num_known_blocks),
            )
            self.num_stored_blocks = num_full_blocks
        if kv.is_windowed(self.tables):
            kv.free_out_of_window(self.tables, self.earliest_next_token)

    def take_used(self) -> list[bytes]:
        """Returns the hashes of the blocks stored or reused since the last call, each once."""
        first = self.num_used_blocks
        self.num_used_blocks = max(first, self.num_stored_blocks)
        return self.block_hashes[first : self.num_stored_blocks]

    def stop_awaiting_kv(self) -> None:
        """Stops waiting for KV from a peer: this engine computes what is missing."""
        if self.mode is Mode.WAITING_FOR_REMOTE_KV:
            self.mode = Mode.LOCAL
        self.num_prefix_blocks = 0

    def _countable(self, cached: CachedTokens) -> CachedTokens:
        """Returns `cached` limited to the prompt's tokens; for a PREFILL_ONLY sequence, to all its
        tokens."""
        counts_output = self.mode is Mode.PREFILL_ONLY
        return cached.first(self.num_tokens if counts_output else self.spec.num_prompt_tokens)

    def release_tables(self) -> BlockTables:
        """Removes all blocks from the sequence and returns their tables, which the caller
        releases."""
        tables, self.tables = self.tables, BlockTables()
        self.num_computed_tokens = self.num_stored_blocks = 0
        self.loading = Loading()
        self.is_forked = False
        return tables


def finish_reason(spec: SequenceSpec, token_ids: list[int], max_model_len: int) -> str:
    """Returns "stop" or "length" if the last token ends the sequence, otherwise ""."""
    num_output_tokens = len(token_ids) - spec.num_prompt_tokens
    sampling = spec.sampling
    if num_output_tokens and token_ids[-1] in (sampling.stop_token_ids or ()):
        return "stop"
    # None: only the context bounds the answer; a router always sets a number.
    max_tokens = max_model_len if sampling.max_tokens is None else sampling.max_tokens
    if num_output_tokens >= max_tokens or len(token_ids) >= max_model_len:
        return "length"
    return ""
