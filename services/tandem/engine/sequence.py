"""One sequence of an engine: its tokens, the progress of its KV, and the blocks that it references.

    state             event                                   next state
    WAITING           admitted, no KV to wait for             RUNNING
    WAITING           admitted, blocks are in a tier          LOADING
    WAITING           admitted, a peer sends KV               WAITING_FOR_KV
    LOADING           load ended                              RUNNING or WAITING_FOR_KV
    LOADING           load stalled                            WAITING, and never LOADING again
    WAITING_FOR_KV    commit, start_local_prefill             RUNNING, if it awaited all KV
    WAITING_FOR_KV    continue_prefill                        RUNNING, if it awaited a prefix
    WAITING_FOR_KV    restart                                 WAITING
    RUNNING           preempted                               WAITING
    RUNNING           last token generated                    removed
    RUNNING           prompt computed, a peer will decode     HELD
    HELD              remove                                  removed

The mode of a sequence (`Mode`, types.py) determines what a peer does. In the mode
WAITING_FOR_REMOTE_KV, a peer sends all KV, and the mode becomes LOCAL when the sequence is RUNNING.
In the mode PREFILL_ONLY, a peer decodes. In the modes LOCAL and PREFILL_ONLY, a peer may send a
prefix. If the model has sliding windows and less KV arrived than the sequence awaited, the sequence
goes from WAITING_FOR_KV back to WAITING and computes everything itself.

The scheduler moves sequences between WAITING and RUNNING; the engine makes all other transitions. A
WAITING sequence references no block. Every other sequence references all blocks in its `tables`,
until it returns to WAITING or is removed.

The tokens and blocks of a running sequence with n tokens:

    tokens  [ cached | computed earlier | this step's chunk | missing ]   token n is sampled next
                                        ^ num_computed_tokens          ^ n
    blocks  [ stored: hashed, shared, never written | own: only this sequence writes them ]

A fork is a sequence that starts from the KV of a running sequence with the same first tokens, such
as the second of several answers to one prompt. It shares the stored blocks of this parent, and gets
a copy of the parent's next block. An example with blocks of 8 tokens, in which both have the same
first 5 tokens after the stored blocks. The fork's last token is computed again for its logits:

    parent [ stored | own block: 5 of 8 tokens computed ]
    fork   [ shared | own copy: 4 of 5 tokens computed, 1 missing ]

The tokens of a sequence may equal only the first tokens of a cached block. Then the sequence gets a
copy of this block and computes the tokens after those that are equal:

    cached blocks [ stored | a b c d e f g h | ... ]
    sequence      [ shared | a b c copied; u v w missing ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from tandem.common.block_hash import block_hash, hash_blocks
from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.config.engine import FORCED_MAX
from tandem.common.prompt_image import PromptImage, image_marks
from tandem.common.speculation import TOKENS_MAX
from tandem.engine.cache.block_copy import NO_PART, BlockCopy, BlockPart
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.checkpoints import Checkpoints
from tandem.engine.cache.kv_cache import BlockDemand, KvCache
from tandem.engine.cache.layout.kv_groups import INNER_CHUNK
from tandem.engine.logit_edits import LogitEdits
from tandem.engine.speculation.drafter import NOTHING, Proposal, Proposer
from tandem.engine.types import Mode, SequenceSpec, TokenLogprobs
from tandem.models.grammars.masks import GrammarMatcher

if TYPE_CHECKING:
    import torch


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    WAITING_FOR_KV = "awaiting_kv"
    RUNNING = "running"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """How a sequence starts: the blocks that it reuses, and the token from which it continues."""

    num_cached_blocks: int
    num_computed_tokens: int
    # Number of tokens that have KV once all awaited KV has arrived. This engine (PREFILL_ONLY: the
    # consumer) continues after these tokens, or after the last part of a block. With `checkpoint`,
    # it is not larger than the tokens before the frozen states. In a model with sliding windows,
    # this number determines which blocks are needed.
    resume: int
    # Ids of blocks to copy from, one for each KV group. They are copied into the first block that
    # only this sequence writes, or into its running state. Empty: nothing is copied.
    sources: tuple[int | None, ...]
    is_fork: bool
    # Number of blocks after which frozen states are transferred to the consumer; 0: none are.
    checkpoint: int = 0
    # Frozen states that become the running states of the sequence, one for each state group, in
    # place of copies of `sources`.
    taken: tuple[int, ...] = ()

    def taking_states(self) -> SequenceStart:
        """Returns a start that needs no slots besides those of `sources`, which are then not cached
        any more."""
        taken = tuple(source for source in self.sources if source is not None)
        return replace(self, sources=(), taken=taken)


@dataclass(slots=True)
class Loading:
    """The load of one sequence's blocks from the tiers below the pool: host memory, disk, object
    store.

    Blocks are loaded from the last to the first. Meanwhile the sequence may compute blocks from the
    first to the last. An example of 10 blocks, of which the pool has 2 and the tiers have 6 more:

        block     0 1       2 3 4       5 6 7     8 9
        source    pool      computed    loaded    computed after the load
                            ^ num_stored_blocks   ^ end

    If block 5 cannot be loaded, the load ends with `loaded` = range(6, 8). The sequence then
    computes block 5 too, and continues with block 8.
    """

    end: int = 0  # number of leading blocks that have KV when the load ends; 0: no load
    # True: the sequence computes its first missing blocks during the load. False: it only waits.
    computes: bool = False
    num_spared: int = 0  # number of blocks that the sequence is expected to compute during the load
    # True: the blocks after `end` may come from a peer. False: this engine computes them.
    awaits: bool = True
    loaded: range = range(0)  # indices of loaded blocks; empty once all blocks before them have KV

    def take(self, first: int, end: int) -> None:
        """Records that the load has ended and has filled the blocks first..end - 1."""
        self.end = 0
        self.computes = False
        self.loaded = range(first, end)

    def skip(self, num_blocks: int) -> int:
        """Returns the number of leading blocks that have KV once the first `num_blocks` blocks are
        computed. Loaded blocks that directly follow the computed blocks count too."""
        if self.loaded and num_blocks >= self.loaded.start:
            num_blocks = max(num_blocks, self.loaded.stop)
            self.loaded = range(0)
        return num_blocks


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: str
    spec: SequenceSpec
    # At first the spec's mode. WAITING_FOR_REMOTE_KV becomes LOCAL when the wait for KV ends.
    mode: Mode
    token_ids: list[int]
    # Number in the order of arrival. Preemption and restart keep it.
    arrival: int
    block_size: int
    chain_root: bytes
    block_hashes: list[bytes]  # one hash for each full block of token_ids
    # Index of each block with tokens of images -> its mark (common/prompt_image.py).
    marks: Mapping[int, bytes]
    # PREFILL_ONLY: number of leading blocks that need no report, because the consumer does not want
    # them or they were reported already.
    num_reported_blocks: int
    next_in_transfer: int  # PREFILL_ONLY: index of the next block to report, in transfer order
    # LOCAL, PREFILL_ONLY: number of leading blocks to pull from a peer if they are not cached.
    num_prefix_blocks: int
    # Positions after which the states of layers with linear attention are frozen. None: the model
    # has no such layers.
    checkpoints: Checkpoints | None = None
    # Number of tokens before the last frozen state of the answer; 0: there is none.
    frozen_at: int = 0
    status: Status = Status.WAITING
    tables: BlockTables = field(default_factory=BlockTables)
    num_computed_tokens: int = 0  # number of leading tokens whose KV is in the sequence's blocks
    num_prefill_tokens: int = 0  # number of tokens at admission; the tokens after these are decoded
    num_stored_blocks: int = 0  # number of leading blocks that are cached in the pool
    num_used_blocks: int = 0  # number of leading blocks that `take_used` has reported so far
    # Tokens reused at the first admission; None: not admitted yet.
    cached: CachedTokens | None = None
    loading: Loading = field(default_factory=Loading)  # the load from a tier below the pool
    # Models with sliding windows: number of leading blocks that the full-attention group had in its
    # pool or in a tier at admission. The groups with a window may have lacked these blocks.
    num_known_blocks: int = 0
    # WAITING: number of leading blocks that were cached when the sequence was enqueued.
    num_matched_blocks: int = 0
    # True once a step has computed tokens since the sequence got its blocks. Its running states are
    # then those of this step, whatever its slot has.
    has_run: bool = False
    # True once a step of this engine computes tokens of the sequence, and once a sequence that
    # decodes here was RUNNING. From then on the sequence is not refused as late.
    is_begun: bool = False
    has_waited: bool = False  # True once a step was planned while the sequence was in a queue
    may_load: bool = True  # False: a load has stalled, so nothing is loaded from a tier again
    num_preemptions: int = 0
    # WAITING: time at which the sequence began to wait for blocks that another sequence computes
    # (early_reuse.py). 0: the sequence does not wait for such blocks.
    shared_since: float = 0.0
    # Total seconds of earlier waits for such blocks, without the current wait.
    shared_wait_s: float = 0.0
    # Number of prompt tokens of other sequences that were missing when this sequence arrived.
    tokens_ahead: int = 0
    is_forked: bool = False  # True: admitted as a fork, so only the last token is missing
    # PREFILL_ONLY: predicted time in seconds from the end of the last chunk until the consumer has
    # pulled all KV computed so far.
    pull_lag_s: float = 0.0
    # Embeddings of the prompt's images that are still to be computed here, by the image's digest.
    image_rows: dict[bytes, torch.Tensor] = field(default_factory=dict)
    drafter: Proposer | None = None  # proposes next tokens; None: the sequence does not speculate
    edits: LogitEdits | None = None  # edits of the next token's logits; None: no edits
    # Log probabilities of the prompt's tokens that were computed and not yet reported.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Embedding of the prompt. Empty if none is requested, before it is computed, and after it was
    # reported.
    embedding: list[float] = field(default_factory=list)

    @classmethod
    def from_spec(
        cls,
        spec: SequenceSpec,
        *,
        arrival: int,
        block_size: int,
        chain_root: bytes,
        checkpoints: Checkpoints | None = None,
    ) -> Sequence:
        num_reusable = 0 if spec.kv_budget else (len(spec.token_ids) - 1) // block_size
        marks = image_marks(spec.images, block_size)
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
            block_hashes=hash_blocks(chain_root, spec.token_ids, block_size, marks),
            marks=marks,
            num_reported_blocks=spec.first_wanted_block,
            next_in_transfer=spec.first_wanted_block,
            num_prefix_blocks=0 if takes_none else min(spec.prefix_blocks, num_reusable),
            checkpoints=checkpoints,
        )

    @property
    def grammar(self) -> GrammarMatcher | None:
        """Tracks the completion's position in its grammar; None if it has no grammar."""
        return None if self.edits is None else self.edits.grammar

    @property
    def awaits_grammar(self) -> bool:
        """True while the grammar is being compiled. The sequence is admitted only after that."""
        return self.grammar is not None and not self.grammar.is_compiled

    @property
    def awaits_mask(self) -> bool:
        """True while the grammar's mask for the next token is being computed. Until the mask is
        ready, the sequence is in no step."""
        return self.grammar is not None and self.grammar.is_late

    @property
    def needs_mask_first(self) -> bool:
        """True if the sequence's last token must not be computed before the grammar's mask for the
        next token is ready.

        If the mask were late, the last token would be computed a second time. With a KV budget, the
        attention weights of the last token would then be counted twice. A state would take in the
        token twice.
        """
        if self.grammar is None or self.grammar.update_job is not None:
            return False
        has_sums = self.spec.kv_budget is not None or self.checkpoints is not None
        return self.grammar.is_slow or has_sums

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_tokens(self, index: int) -> list[int]:
        """Returns the token ids of a block; the last block may have fewer than `block_size`."""
        return self.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def shown_tokens(self, index: int) -> list[int]:
        """Returns the token ids of a block, by which other sequences find the block. A block with
        tokens of an image is found by its hash alone, because the tokens do not say which image."""
        return [] if index in self.marks else self.block_tokens(index)

    def first_image_token(self, first: int, end: int) -> int:
        """Returns the index of the first token of an image among the tokens `first` to `end` - 1;
        `end` if there is none."""
        found = (at for image in self.spec.images for at, _ in image.rows_in(first, end))
        return min(found, default=end)

    @property
    def missing_images(self) -> list[PromptImage]:
        """The images with tokens whose KV is missing."""
        tokens = self.num_computed_tokens, self.spec.num_prompt_tokens
        return [image for image in self.spec.images if any(image.rows_in(*tokens))]

    def embeddings(self, first: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """Returns the embeddings of images for the tokens `first` to `end` - 1: for each run of
        their tokens, the index of the first one after `first`, and fp32 [tokens, hidden]."""
        return [
            (at - first, self.image_rows[image.digest][rows.start : rows.stop])
            for image in self.spec.images
            for at, rows in image.rows_in(first, end)
        ]

    @property
    def num_missing_tokens(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def block_table(self) -> list[int]:
        """Block table of the first KV group; empty while the sequence is WAITING."""
        ids = self.tables.ids
        return ids[0] if ids else []

    @property
    def num_next_tokens(self) -> int:
        """Largest number of tokens that the next chunk may have. A chunk ends where loaded blocks
        begin, at each point at which a KV budget evicts blocks, and where states are frozen."""
        if self.checkpoints is not None:
            return min(self.num_missing_tokens, self.next_checkpoint - self.num_computed_tokens)
        if hitters := self.tables.hitters:
            return min(
                self.num_missing_tokens, hitters.num_until_eviction(self.num_computed_tokens)
            )
        if loaded := self.loading.loaded:
            return loaded.start * self.block_size - self.num_computed_tokens
        return self.num_missing_tokens

    @property
    def next_checkpoint(self) -> int:
        """Number of tokens after which states are frozen next. Only if the model has states."""
        assert self.checkpoints is not None
        num_computed = self.num_computed_tokens
        end = self.checkpoints.next_after(num_computed, self.num_prefill_tokens)
        return min((end, *(each for each in self._shared if each > num_computed)))

    @property
    def _shared(self) -> tuple[int, ...]:
        """The last positions in beginnings that other prompts have, too, so that a state is worth
        its memory: the system prompt with its tools, the part that is pinned, and the KV that was
        cached at admission. 0: there is no such beginning."""
        assert self.checkpoints is not None
        num_known = min(self.num_known_blocks, self.last_depth) * self.block_size
        ends = (self.spec.system_tokens, self.spec.retention.num_tokens, num_known)
        return tuple(map(self.checkpoints.last_until, ends))

    @property
    def num_final_blocks(self) -> int:
        """Number of leading blocks that will not change any more. A partly filled last block counts
        only if a PREFILL_ONLY sequence is completely computed."""
        if self.tables.hitters is not None and self.status is not Status.HELD:
            return 0  # the KV budget may still evict any block
        if self.mode is Mode.PREFILL_ONLY and not self.num_missing_tokens:
            return self.tables.num_full(self.num_tokens)
        return self.num_computed_tokens // self.block_size

    @property
    def last_depth(self) -> int:
        """Number of full blocks before the last token: 2 for 48 tokens and blocks of 16 tokens.

        A sequence with the same tokens can reuse at most these blocks, because it must compute the
        last token. A peer that continues the sequence therefore resumes after these blocks.
        """
        return (len(self.token_ids) - 1) // self.block_size

    @property
    def earliest_next_token(self) -> int:
        """Index of the first token that will still attend to this sequence's KV, on this engine or
        (PREFILL_ONLY) on the consumer, where other requests may resume after the frozen states that
        are transferred. KV before the window of this token can be freed."""
        if self.mode is not Mode.PREFILL_ONLY:
            return self.num_computed_tokens
        depth = self.tables.checkpoint or self.last_depth
        return min(self.num_computed_tokens, depth * self.block_size)

    @property
    def reusable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that the sequence can reuse if they are cached at admission.

        The block of the last token is left out. The last token must be computed, because its logits
        are needed, and a cached block must not be written.
        """
        return [] if self.wants_prompt_logits else self.block_hashes[: self.last_depth]

    @property
    def wants_prompt_logits(self) -> bool:
        """True while log probabilities of the prompt are requested and not computed yet.

        They cover all tokens of the prompt but the first, and are computed once, before the first
        output token.
        """
        return (
            self.spec.sampling.prompt_logprobs is not None
            and len(self.token_ids) == self.spec.num_prompt_tokens
            and len(self.prompt_logprobs) < self.spec.num_prompt_tokens - 1
        )

    @property
    def wants_embedding(self) -> bool:
        """True if an embedding of the prompt is requested and the first output token is not sampled
        yet."""
        return self.spec.embed and len(self.token_ids) == self.spec.num_prompt_tokens

    @property
    def may_wait_for_remote_kv(self) -> bool:
        """True if admission may move the sequence to WAITING_FOR_KV."""
        return self.mode is Mode.WAITING_FOR_REMOTE_KV or self.num_prefix_blocks > 0

    @property
    def lacks_kv(self) -> bool:
        """True if a sequence whose blocks are allocated must still wait for a peer's KV.

        A WAITING_FOR_REMOTE_KV sequence waits if at least `remote_prefill_min_tokens` tokens are
        missing. Other sequences wait if their first `num_prefix_blocks` blocks are not all cached.
        """
        if self.is_forked:
            return False
        if self.mode is Mode.WAITING_FOR_REMOTE_KV:
            return self.num_missing_tokens >= self.spec.remote_prefill_min_tokens
        return self.num_prefix_blocks > self.num_stored_blocks

    @property
    def in_decode(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def may_run_ahead(self) -> bool:
        """True if the next token may be computed before it is known on the host, in a step that is
        launched ahead (schedule_ahead, scheduler.py). It must not be computed before the states
        after the last token are frozen, nor if a late mask could drop the sequence from the step,
        because the token is then computed again, and a state must take it only once."""
        if self.checkpoints is not None and self.grammar is not None:
            return False
        freezes = self.checkpoints is not None and self.checkpoints.includes(
            self.num_tokens, self.num_prefill_tokens
        )
        return self.spec.kv_budget is None and not self.needs_mask_first and not freezes

    @property
    def num_drafts_max(self) -> int:
        """Largest number of proposed tokens of the next step."""
        if self.checkpoints is None:
            return TOKENS_MAX
        # A step ends where states are frozen. It has no whole inner chunk, which kernels would
        # compute with other bits than single tokens. Neither has a step that computes accepted
        # tokens again, and with them tokens that a grammar forces.
        most = min(self.next_checkpoint - self.num_tokens, INNER_CHUNK - 2 - FORCED_MAX)
        return max(0, most)

    def propose(self) -> Proposal:
        """Returns proposed next tokens, which the grammar allows. They may be none."""
        if self.drafter is None:
            return NOTHING
        proposal = self.drafter.propose(self.token_ids)
        if self.checkpoints is not None:
            proposal = proposal.first(self.num_drafts_max)
        if self.grammar is not None and proposal.token_ids:
            return proposal.first(self.grammar.count_allowed(proposal.token_ids))
        return proposal

    def ends_with_next(self, max_model_len: int) -> bool:
        """Returns whether the next token ends the sequence, whichever token it is."""
        max_tokens = self.spec.sampling.max_tokens
        num_tokens = len(self.token_ids) + 1
        return num_tokens >= max_model_len or (
            max_tokens is not None and num_tokens - self.spec.num_prompt_tokens >= max_tokens
        )

    def growth(self, num_tokens_max: int) -> int:
        """Returns how many tokens this engine may still sample for the sequence, at most
        `num_tokens_max`."""
        if self.mode is Mode.PREFILL_ONLY:
            return 0
        max_tokens = self.spec.sampling.max_tokens
        if max_tokens is None:
            return num_tokens_max
        num_left = self.spec.num_prompt_tokens + max_tokens - len(self.token_ids)
        return max(0, min(num_tokens_max, num_left))

    @property
    def missing_span(self) -> tuple[int, int]:
        """The tokens that this engine must still prefill, as (number of these tokens, number of
        tokens before them in the sequence). Before admission this is an estimate."""
        if self.status is Status.RUNNING and self.in_decode:  # most sequences, so this is first
            return 0, 0
        awaits_prefix = (
            self.status is Status.WAITING_FOR_KV and self.mode is not Mode.WAITING_FOR_REMOTE_KV
        )
        if self.status is Status.LOADING:
            context = self.loading.end * self.block_size
        elif self.status is Status.WAITING or awaits_prefix:
            num_blocks = max(self.num_prefix_blocks, self.num_matched_blocks)
            context = num_blocks * self.block_size
        elif self.status is Status.RUNNING:
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
            mark = self.marks.get(len(self.block_hashes), b"")
            self.block_hashes.append(block_hash(parent, self.token_ids[-self.block_size :], mark))

    def append_drawn(self, token_id: int, max_model_len: int, forced_max: int) -> list[int]:
        """Appends a sampled token. If the grammar then allows only one next token, appends this
        token too, and so on, up to `forced_max` tokens.

        Returns all appended tokens. Nothing is appended after a token that ends the sequence.
        """
        self.append(token_id)
        new = [token_id]
        edits = self.edits
        wants_logprobs = self.spec.sampling.logprobs is not None
        # The log probability of a token needs the model's logits, which forced tokens do not have.
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
        """Returns (hash of block `num_blocks` - 1, token ids of the sequence's next block): the
        search key for a cached block whose first tokens the sequence can copy.

        The last token of the sequence is left out, because it must be computed.
        """
        if self.wants_prompt_logits:
            return b"", []
        parent_hash = self.block_hashes[num_blocks - 1] if num_blocks else self.chain_root
        wanted = self.block_tokens(num_blocks)
        if num_blocks == self.last_depth:
            wanted = wanted[:-1]
        if num_blocks in self.marks:
            start = num_blocks * self.block_size
            wanted = wanted[: self.first_image_token(start, start + len(wanted)) - start]
        return parent_hash, wanted

    def plan(
        self, num_cached_blocks: int, parent: Sequence | None = None, part: BlockPart | None = None
    ) -> SequenceStart:
        """Returns how the sequence starts if its first `num_cached_blocks` blocks are cached.

        If possible, the sequence becomes a fork of `parent`. Otherwise it copies `part`, the first
        tokens of a cached block. A sequence that awaits KV from a peer copies nothing, because the
        peer sends whole blocks.
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
        checkpoint = 0
        if self.mode is Mode.PREFILL_ONLY:
            checkpoint = self._transferred_checkpoint(self.spec.first_wanted_block)
        elif awaits and self.mode is Mode.WAITING_FOR_REMOTE_KV:
            checkpoint = self._transferred_checkpoint(num_cached_blocks)
            # A request that resumes after these states sees earlier blocks of windows.
            resume = min(resume, checkpoint * self.block_size) if checkpoint else resume
        return SequenceStart(
            num_cached_blocks, num_computed, resume, part.sources, fork is not None, checkpoint
        )

    def demand(self, start: SequenceStart, *, loaded: int = 0) -> BlockDemand:
        """Returns what the sequence needs from the KV pools to start as `start` says, if tiers load
        the first `loaded` blocks; 0: no load."""
        return BlockDemand(
            num_tokens=self.num_tokens,
            resume=start.resume,
            block_hashes=self.reusable_hashes,
            depth=start.num_cached_blocks,
            sources=start.sources,
            taken=start.taken,
            checkpoint=start.checkpoint,
            budget=self.spec.kv_budget,
            loaded=loaded,
        )

    def _transferred_checkpoint(self, first_wanted_block: int) -> int:
        """Returns the number of blocks after which frozen states are transferred to a consumer that
        wants the blocks from `first_wanted_block` on; 0: none are. Producer and consumer compute
        the same number. Without these states, the consumer could not resume after the blocks that
        it has pulled."""
        if self.checkpoints is None:
            return 0
        depth = self.checkpoints.last_before(self.num_tokens) // self.block_size
        return depth if depth > first_wanted_block else 0

    def hold(self, tables: BlockTables, start: SequenceStart) -> list[BlockCopy]:
        """Assigns the block tables at admission. Returns the copies from `start.sources` to the
        sequence's first block after the cached blocks, at most one per KV group."""
        self.tables = tables
        self.has_run = False
        self.num_stored_blocks = num_blocks = start.num_cached_blocks
        self.num_computed_tokens = start.num_computed_tokens
        self.num_prefill_tokens = len(self.token_ids)
        self.is_forked = start.is_fork
        if self.cached is None and not self.loading.end:
            self.cached = self._countable(CachedTokens(device=self.num_computed_tokens))
        return [
            BlockCopy(source, tables.copy_target(group, num_blocks), group)
            for group, source in enumerate(start.sources)
            if source is not None and num_blocks >= tables.firsts[group]
        ]

    def fork_part(self, parent: Sequence, num_blocks: int) -> BlockPart | None:
        """Returns the first tokens of the parent's block `num_blocks`, which this sequence copies
        to become a fork of the parent. Returns None if it cannot become a fork.

        This sequence shares the first `num_blocks` blocks with the parent. It copies the tokens
        after these blocks, except its own last token.
        """
        start = num_blocks * self.block_size
        end = self.num_tokens - 1
        can_fork = (
            not parent.tables.states  # the parent's states may be after more tokens
            and end - start <= self.block_size
            and all(first <= num_blocks for first in parent.tables.firsts)
            and end <= parent.num_computed_tokens
            and not self.wants_prompt_logits
            and self.chain_root == parent.chain_root
            and self.block_hashes[:num_blocks] == parent.block_hashes[:num_blocks]
            and self.token_ids[start:end] == parent.token_ids[start:end]
            and self.marks.get(num_blocks) == parent.marks.get(num_blocks)
        )
        if not can_fork:
            return None
        sources = tuple(ids[num_blocks] for ids in parent.tables.ids) if end > start else ()
        return BlockPart(end - start, sources)

    def take_prefix(self, num_blocks: int) -> None:
        """Records that the first `num_blocks` blocks have KV. The blocks after the cached ones were
        pulled from a peer."""
        num_stored_tokens = self.num_stored_blocks * self.block_size
        self.num_computed_tokens = num_blocks * self.block_size
        if self.num_computed_tokens > num_stored_tokens:
            reused = (self.cached or NONE_CACHED).first(num_stored_tokens)
            reused = reused.then(CachedTokens(device=num_stored_tokens))
            self.cached = self._countable(reused.then(CachedTokens(peer=self.num_computed_tokens)))
        self.advance(0)

    def take_loaded(self, blocks: range, num_cached: int, by_tier: Mapping[str, int]) -> None:
        """Records that the KV of `blocks` was loaded from tiers.

        `num_cached` is the number of blocks that were in the pool before the load. `by_tier` has
        the number of blocks loaded from each tier.
        """
        self.loading.take(blocks.start, blocks.stop)
        self.advance(0)
        if self.cached is None:
            loaded = {name: num * self.block_size for name, num in by_tier.items()}
            device = num_cached * self.block_size
            self.cached = self._countable(CachedTokens(device=device, **loaded))

    def advance(self, num_tokens: int) -> None:
        """Records that the KV of `num_tokens` more tokens is in the pool. Loaded blocks that
        directly follow these tokens then count as computed too."""
        self.num_computed_tokens += num_tokens
        if self.image_rows and not self.missing_images:
            self.image_rows = {}
        self.has_run |= num_tokens > 0
        if self.loading.loaded:
            num_blocks = self.num_computed_tokens // self.block_size
            if (reached := self.loading.skip(num_blocks)) > num_blocks:
                self.num_computed_tokens = reached * self.block_size

    def store_full_blocks(self, kv: KvCache) -> None:
        """Caches the blocks that became full, and releases the blocks that left the window.

        If the pool already has a block with the same hash, that block takes the place of the
        sequence's own block.
        """
        num_full_blocks = self.num_computed_tokens // self.block_size
        if self.spec.kv_budget is None and num_full_blocks > self.num_stored_blocks:
            kv.store(
                self.tables,
                self.block_hashes,
                chain_root=self.chain_root,
                first=self.num_stored_blocks,
                last=num_full_blocks,
                block_tokens=self.shown_tokens,
                adapter=self.spec.adapter,
                resumable=(self.spec.num_prompt_tokens // self.block_size, self.num_known_blocks),
            )
            self.num_stored_blocks = num_full_blocks
        if kv.is_windowed(self.tables):
            sends_states = self.mode is Mode.PREFILL_ONLY and self.tables.checkpoint > 0
            kv.free_out_of_window(
                self.tables,
                self.earliest_next_token,
                num_reserved=self.num_tokens if sends_states else 0,
            )

    @property
    def is_at_checkpoint(self) -> bool:
        """True if the states are to be frozen now, after `num_computed_tokens` tokens."""
        if self.checkpoints is None:
            return False
        num_computed = self.num_computed_tokens
        is_shared = num_computed > 0 and num_computed in self._shared
        return is_shared or self.checkpoints.includes(num_computed, self.num_prefill_tokens)

    def freeze_states(self, kv: KvCache) -> list[BlockCopy]:
        """Caches copies of the running states under the hash of the last full block. Returns the
        copies, which the caller must make at once."""
        depth = self.num_computed_tokens // self.block_size
        if self.frozen_at:
            kv.evict_first(self.tables, self.block_hashes[self.frozen_at // self.block_size - 1])
        self.frozen_at = self.num_computed_tokens if self.in_decode else 0
        return kv.freeze(
            self.tables,
            self.block_hashes[:depth],
            chain_root=self.chain_root,
            token_ids=self.shown_tokens(depth - 1),
            adapter=self.spec.adapter,
            is_wanted=not self.frozen_at,
        )

    def take_frozen_states(self, kv: KvCache) -> None:
        """Caches the frozen states that a peer has sent with the blocks, if there are any."""
        if depth := self.tables.checkpoint:
            kv.store_checkpoint(
                self.tables,
                self.block_hashes[:depth],
                chain_root=self.chain_root,
                token_ids=self.shown_tokens(depth - 1),
                adapter=self.spec.adapter,
            )

    def take_used(self) -> list[bytes]:
        """Returns the hashes of the blocks stored or reused since the last call. No block is
        returned twice, even if it is computed again after a preemption."""
        first = self.num_used_blocks
        self.num_used_blocks = max(first, self.num_stored_blocks)
        return self.block_hashes[first : self.num_stored_blocks]

    def stop_awaiting_kv(self) -> None:
        """Ends the wait for a peer's KV. This engine computes the missing tokens."""
        if self.mode is Mode.WAITING_FOR_REMOTE_KV:
            self.mode = Mode.LOCAL
        self.num_prefix_blocks = 0

    def _countable(self, cached: CachedTokens) -> CachedTokens:
        """Returns `cached` without output tokens, because reports count only the prompt's cached
        tokens. For a PREFILL_ONLY sequence all tokens count."""
        counts_output = self.mode is Mode.PREFILL_ONLY
        return cached.first(self.num_tokens if counts_output else self.spec.num_prompt_tokens)

    def release_tables(self) -> BlockTables:
        """Removes all blocks from the sequence and returns their tables, which the caller
        releases."""
        tables, self.tables = self.tables, BlockTables()
        self.num_computed_tokens = self.num_stored_blocks = self.frozen_at = 0
        self.loading = Loading()
        self.is_forked = False
        self.image_rows = {}
        return tables


def finish_reason(spec: SequenceSpec, token_ids: list[int], max_model_len: int) -> str:
    """Returns "stop" or "length" if the last token ends the sequence, otherwise ""."""
    num_output_tokens = len(token_ids) - spec.num_prompt_tokens
    sampling = spec.sampling
    if num_output_tokens and token_ids[-1] in (sampling.stop_token_ids or ()):
        return "stop"
    # None: only the context length limits the answer. A router always sets a number.
    max_tokens = max_model_len if sampling.max_tokens is None else sampling.max_tokens
    if num_output_tokens >= max_tokens or len(token_ids) >= max_model_len:
        return "length"
    return ""
