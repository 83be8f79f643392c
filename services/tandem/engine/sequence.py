"""One sequence on an engine: its tokens, how far its KV is, and the blocks it references.

    WAITING ---admit---> RUNNING ---(finish)---> gone                 Mode.LOCAL
       |  ^                 |  `--(computed)---> HELD --remove--> gone  Mode.PREFILL_ONLY
       |  '----preempt------'
       |---admit---> LOADING --all loaded, or what could be--> RUNNING or WAITING_FOR_KV
       |              (it may compute its first blocks meanwhile; then it is RUNNING next)
       |                 `--stalled--> WAITING, and LOADING no more
       `---admit---> WAITING_FOR_KV --commit or start_local_prefill--> RUNNING
       (WAITING_FOR_REMOTE_KV: LOCAL now)
                          |------continue_prefill--> RUNNING (LOCAL and PREFILL_ONLY with a prefix)
                          `------restart--> WAITING  (and, with windows, whoever did not get the
                                                      KV that it awaited)

The scheduler moves WAITING and RUNNING, the engine the rest. A WAITING sequence references no
block; every other one references all that its `tables` hold, and whoever ends that state releases
it.

Ranges of a running sequence (n tokens):

    [ cached | computed earlier | this step's chunk | to come  ]  token n is the next one sampled
             num_cached         num_computed_tokens            n
    [ stored blocks: hashed, shared, never written | own blocks: only this sequence writes them ]

A fork shares its parent's stored blocks, as any sequence does, and gets a copy of the block after
them, in which only its last token is missing:

    parent [ stored | half-filled: 5 of 8 tokens, more come ]
    fork   [ the same | its own copy, of 4 of its 5 tokens  ]

A sequence that leaves a cached chain inside a block gets a copy of that block, and goes on after
the tokens that both have:

    chain    [ stored | a b c d e f g h | ... ]
    sequence [ the same | a b c, copied; u v w, to come ]
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
    """The start of a sequence: what it reuses, and the token that it goes on with."""

    num_cached_blocks: int
    num_computed_tokens: int
    resume: int  # it goes on with the token after so many others, once it awaits no KV any more
    sources: tuple[int, ...]  # blocks of each group that are copied into its first own one
    is_fork: bool


@dataclass(slots=True)
class Loading:
    """The blocks of one sequence that come from a tier below the pool.

    [ held | computed meanwhile, or to be loaded | the rest is computed ]
           ^ num_stored_blocks                   end
    [ held, computed | a gap: it could not be loaded | loaded | the rest ]     a load that failed
    """

    end: int = 0  # LOADING: its first blocks that will be there
    computes: bool = False  # LOADING: it computes the first of them meanwhile
    num_spared: int = 0  # of those to be loaded: so many are expected to be computed instead
    awaits: bool = True  # LOADING: what comes after it may come from a peer
    loaded: range = range(0)  # in place, and not reached by computing yet

    def take(self, first: int, end: int) -> None:
        """The load ended: blocks first..end - 1 are in place."""
        self.end = 0
        self.computes = False
        self.loaded = range(first, end)

    def skip(self, num_blocks: int) -> int:
        """Returns how many first blocks are in place once so many are."""
        if self.loaded and num_blocks >= self.loaded.start:
            num_blocks, self.loaded = max(num_blocks, self.loaded.stop), range(0)
        return num_blocks


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: str
    spec: SequenceSpec
    mode: Mode  # the spec's, until nothing is awaited any more
    token_ids: list[int]
    arrival: int  # order of coming; kept over preemption and restart, so the oldest goes first
    block_size: int
    chain_root: bytes
    block_hashes: list[bytes]  # of the full blocks of token_ids
    num_reported_blocks: int  # PREFILL_ONLY: the consumer was told of these, or does not want them
    next_in_transfer: int  # PREFILL_ONLY: the number of the next block to tell of, in their order
    # LOCAL, PREFILL_ONLY: to come from a peer, if they are not cached; 0: none.
    num_prefix_blocks: int
    status: Status = Status.WAITING
    tables: BlockTables = field(default_factory=BlockTables)
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks
    num_prefill_tokens: int = 0  # tokens there were at admission; decode comes after them
    num_stored_blocks: int = 0  # the table's first blocks that the pool finds by hash
    num_used_blocks: int = 0  # of those, as `take_used` has told
    cached: CachedTokens | None = None  # that the first admission reused; None before it
    loading: Loading = field(default_factory=Loading)  # from a tier below the pool
    num_known_blocks: int = 0  # others had these first ones, maybe without all that windows need
    num_matched_blocks: int = 0  # WAITING: the pool had these first ones when it was enqueued
    is_begun: bool = False  # some of it was computed here
    has_waited: bool = False  # it did not begin in the step after it came
    may_load: bool = True  # from a tier below the pool: until such a load stood still
    num_preemptions: int = 0
    shared_since: float = 0.0  # WAITING for blocks that another computes (early_reuse.py); 0: not
    shared_wait_s: float = 0.0  # in all
    is_forked: bool = False  # admitted with all but its last token, thanks to its parent
    # PREFILL_ONLY: predicted, of its consumer's pulls behind what is computed.
    pull_lag_s: float = 0.0
    edits: LogitEdits | None = None  # of the next token's logits; None: none were asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # as far as computed
    embedding: list[float] = field(default_factory=list)  # of its prompt, until it is reported

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
        """The position of its completion in its grammar; None if it may be any text."""
        return None if self.edits is None else self.edits.grammar

    @property
    def awaits_grammar(self) -> bool:
        """True while its grammar is compiled; it is not admitted before."""
        return self.grammar is not None and not self.grammar.is_compiled

    @property
    def awaits_mask(self) -> bool:
        """True while the mask of its next token is being made; it is in no step then."""
        return self.grammar is not None and self.grammar.is_late

    @property
    def needs_mask_first(self) -> bool:
        """True if its last token may be computed only when the next one can be drawn.

        A late mask lets it be computed again, which a KV budget would count as more attention."""
        if self.grammar is None or self.grammar.update_job is not None:
            return False
        return self.grammar.is_slow or self.spec.kv_budget is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_tokens(self, index: int) -> list[int]:
        """Returns the token ids of a block, fewer of the last one."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def block_table(self) -> list[int]:
        """The table of the first KV group; empty while it waits."""
        ids = self.tables.ids
        return ids[0] if ids else []

    @property
    def num_next_tokens(self) -> int:
        """Missing tokens before others whose KV was loaded, and before blocks leave."""
        if hitters := self.tables.hitters:
            return min(self.num_missing_tokens, hitters.num_left(self.num_computed_tokens))
        if loaded := self.loading.loaded:
            return loaded.start * self.block_size - self.num_computed_tokens
        return self.num_missing_tokens

    @property
    def num_final_blocks(self) -> int:
        """Blocks that will not change any more; of a sequence that decodes, only full ones."""
        if self.tables.hitters is not None and self.status is not Status.HELD:
            return 0  # any block may still leave
        if self.mode is Mode.PREFILL_ONLY and not self.num_missing_tokens:
            return self.tables.num_full(self.num_tokens)
        return self.num_computed_tokens // self.block_size

    @property
    def last_depth(self) -> int:
        """Full blocks before its last token: the most that a sequence of its tokens can reuse, so
        one whose KV moves to a peer moves what the token after them sees."""
        return (len(self.token_ids) - 1) // self.block_size

    @property
    def num_passed_tokens(self) -> int:
        """Tokens after which all that is still to be seen of its KV comes, here and at its
        consumer."""
        if self.mode is not Mode.PREFILL_ONLY:
            return self.num_computed_tokens
        return min(self.num_computed_tokens, self.last_depth * self.block_size)

    @property
    def reusable_hashes(self) -> list[bytes]:
        """Hashes to look for at admission: at least the last token is computed, to have logits,
        and in a block of its own, because a shared one is never written."""
        return [] if self.wants_prompt_logits else self.block_hashes[: self.last_depth]

    @property
    def wants_prompt_logits(self) -> bool:
        """True while log probabilities of its prompt are to be computed: of all tokens but the
        first, once, before its first token."""
        return (
            self.spec.sampling.prompt_logprobs is not None
            and len(self.token_ids) == self.spec.num_prompt_tokens
            and len(self.prompt_logprobs) < self.spec.num_prompt_tokens - 1
        )

    @property
    def wants_embedding(self) -> bool:
        """True before the first token of a sequence whose prompt is to be embedded."""
        return self.spec.embed and len(self.token_ids) == self.spec.num_prompt_tokens

    @property
    def may_wait_for_remote_kv(self) -> bool:
        """True if its admission may end in WAITING_FOR_KV."""
        return self.mode is Mode.WAITING_FOR_REMOTE_KV or self.num_prefix_blocks > 0

    @property
    def lacks_kv(self) -> bool:
        """Admitted, with less cached than is to come from outside."""
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
        """Prefill that this engine still has to do for it, as far as is known before admission: so
        many tokens, after so many others."""
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
        """Appends a drawn token and at most `forced_max` that its grammar forces after it. Returns
        all of them; none follows one that ends the sequence."""
        self.append(token_id)
        new = [token_id]
        edits = self.edits
        wants_logprobs = self.spec.sampling.logprobs is not None
        if edits is None or wants_logprobs:  # the model's logits tell the log probabilities
            return new
        while len(new) <= forced_max:
            if finish_reason(self.spec, self.token_ids, max_model_len):
                break
            if (forced := edits.find_forced()) is None:
                break
            self.append(forced)
            new.append(forced)
        return new

    def wanted_after(self, num_blocks: int) -> tuple[bytes, list[int]]:
        """Returns the hash of the last one of so many blocks, and the tokens after it that a copied
        block may have: at least the last one is computed."""
        if self.wants_prompt_logits:
            return b"", []
        parent_hash = self.block_hashes[num_blocks - 1] if num_blocks else self.chain_root
        wanted = self.block_tokens(num_blocks)
        return parent_hash, wanted[:-1] if num_blocks == self.last_depth else wanted

    def plan(
        self, num_cached_blocks: int, parent: Sequence | None = None, part: BlockPart | None = None
    ) -> Admission:
        """Returns how it would be admitted with so many first blocks cached, and after them a part
        of one. One that awaits KV from outside takes no part: the whole block comes."""
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
        """Takes its blocks at admission; the first ones have their KV. Returns the copies that give
        it the part of a block."""
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
        """Returns the part of a parent that has all that is missing here after `num_blocks` blocks
        but the last token, in the one block after those that both share; None: it has not."""
        start, end = num_blocks * self.block_size, self.num_tokens - 1
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
        """The KV of its first `num_blocks` blocks is in place: some of it came from a peer."""
        num_stored_tokens = self.num_stored_blocks * self.block_size
        self.num_computed_tokens = num_blocks * self.block_size
        if self.num_computed_tokens > num_stored_tokens:
            here = (self.cached or NONE_CACHED).first(num_stored_tokens)
            here = here.then(CachedTokens(device=num_stored_tokens))
            self.cached = self._countable(here.then(CachedTokens(peer=self.num_computed_tokens)))
        self.advance(0)

    def take_loaded(self, blocks: range, num_cached: int, by_tier: Mapping[str, int]) -> None:
        """The KV of `blocks` is in place, and `num_cached` blocks were at its admission; `by_tier`
        says how many came from each tier."""
        self.loading.take(blocks.start, blocks.stop)
        self.advance(0)
        if self.cached is None:
            loaded = {name: num * self.block_size for name, num in by_tier.items()}
            device = num_cached * self.block_size
            self.cached = self._countable(CachedTokens(device=device, **loaded))

    def advance(self, num_tokens: int) -> None:
        """The KV of so many more tokens is in place; loaded blocks after them count, too."""
        self.num_computed_tokens += num_tokens
        if self.loading.loaded:
            num_blocks = self.num_computed_tokens // self.block_size
            if (reached := self.loading.skip(num_blocks)) > num_blocks:
                self.num_computed_tokens = reached * self.block_size

    def store_full_blocks(self, kv: KvCache) -> None:
        """Lets others find what became full. A block that is there already takes its place."""
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
        if kv.passes(self.tables):
            kv.pass_by(self.tables, self.num_passed_tokens)

    def take_used(self) -> list[bytes]:
        """Returns hashes of the blocks stored or reused since the last call, once each."""
        first = self.num_used_blocks
        self.num_used_blocks = max(first, self.num_stored_blocks)
        return self.block_hashes[first : self.num_stored_blocks]

    def await_nothing(self) -> None:
        """Ends the wait for KV from outside: what is missing is computed here."""
        if self.mode is Mode.WAITING_FOR_REMOTE_KV:
            self.mode = Mode.LOCAL
        self.num_prefix_blocks = 0

    def _countable(self, cached: CachedTokens) -> CachedTokens:
        """Returns what of its cached tokens counts as reused."""
        is_whole = self.mode is Mode.PREFILL_ONLY
        return cached.first(self.num_tokens if is_whole else self.spec.num_prompt_tokens)

    def let_go(self) -> BlockTables:
        """Gives up all its blocks; returns them, to be released."""
        tables, self.tables = self.tables, BlockTables()
        self.num_computed_tokens = self.num_stored_blocks = 0
        self.loading = Loading()
        self.is_forked = False
        return tables


def finish_reason(spec: SequenceSpec, token_ids: list[int], max_model_len: int) -> str:
    """Returns "stop" or "length" if the last of its tokens ended the sequence, else ""."""
    num_output_tokens = len(token_ids) - spec.num_prompt_tokens
    sampling = spec.sampling
    if num_output_tokens and token_ids[-1] in (sampling.stop_token_ids or ()):
        return "stop"
    max_tokens = sampling.max_tokens or max_model_len
    if num_output_tokens >= max_tokens or len(token_ids) >= max_model_len:
        return "length"
    return ""
