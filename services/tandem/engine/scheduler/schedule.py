"""The plan of one step: the chunks to compute, and the block copies to make before them."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.common.adapter import digest_of
from tandem.common.perf_model.rates import token_contexts
from tandem.common.perf_model.step_time import StepWork
from tandem.engine.cache.block_copy import BlockCopy
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.engine.sequence import Sequence


class Chunk(NamedTuple):
    """The tokens of one sequence that a step computes: the first `num_tokens` tokens whose KV is
    missing."""

    sequence: Sequence
    num_tokens: int
    # True: the chunk ends with the sequence's last token, so the next token is sampled.
    samples: bool
    all_logits: bool  # True: the logits of all tokens in the chunk are needed
    # In a step that is launched ahead: the place of the chunk's token among the tokens that the
    # step before samples. None: the chunk's tokens are known.
    place: int | None = None
    drafts: tuple[int, ...] = ()  # proposed tokens, which the step computes after the chunk's
    # Models with states: copies of the running states to scratch slots. The step computes the
    # proposed tokens, and the chunk's, on these.
    scratch: tuple[BlockCopy, ...] = ()

    @property
    def slice(self) -> SequenceSlice:
        sequence = self.sequence
        budget = sequence.spec.kv_budget
        tables = sequence.tables.ids
        hitters = sequence.tables.hitters
        if self.place is not None:
            return SequenceSlice(
                token_ids=[-1 - self.place],
                context_len=sequence.num_tokens + 1,
                block_table=tables[0],
                other_tables=tables[1:],
                wants_logits=True,
                adapter=digest_of(sequence.spec.adapter),
            )
        start = sequence.num_computed_tokens
        end = start + self.num_tokens
        if hitters is not None:
            context_len = end - hitters.num_evicted_tokens
            return SequenceSlice(
                token_ids=sequence.token_ids[start:end],
                context_len=context_len,
                block_table=tables[0],
                wants_logits=self.samples,
                all_logits=self.all_logits,
                wants_hidden=self.samples and sequence.spec.embed,
                adapter=digest_of(sequence.spec.adapter),
                num_evicted=hitters.num_evicted_tokens,
                block_sums=hitters.sums(context_len),
                given=sequence.embeddings(start, end),
            )
        others = tables[1:]
        for copy in self.scratch:
            others[copy.group - 1] = [copy.target]
        return SequenceSlice(
            token_ids=[*sequence.token_ids[start:end], *self.drafts],
            context_len=end + len(self.drafts),
            block_table=tables[0],
            other_tables=others,
            wants_logits=self.samples,
            all_logits=self.all_logits,
            wants_hidden=self.samples and sequence.spec.embed,
            adapter=digest_of(sequence.spec.adapter),
            visible=budget.visible if budget is not None else None,
            given=sequence.embeddings(start, end),
            num_drafts=len(self.drafts),
        )


@dataclass(slots=True)
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    # Copies of blocks to make before the forward pass of the step.
    copies: list[BlockCopy] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)
    # number of tokens whose logits are needed for log probabilities of prompts
    num_prompt_logits: int = 0
    num_line_tokens: int = 0  # prompt tokens of batches' lines
    # True: a prompt was left to the next step, and younger ones must not pass it.
    is_closed: bool = False

    is_ahead: bool = False  # True: planned before the tokens of the step before are known

    @property
    def batch(self) -> StepBatch:
        return StepBatch([chunk.slice for chunk in self.chunks], self.is_ahead)

    @property
    def num_prompts(self) -> int:
        """Number of prompts of which the step computes tokens."""
        return sum(not chunk.sequence.in_decode for chunk in self.chunks)

    @property
    def top_k(self) -> int:
        """Number of largest logits of each row that the step's samplings read; 0 if one reads all.

        Log probabilities read all logits. Penalties and masks may make any token the most likely
        one.
        """
        most = 1
        for chunk in self.chunks:
            sequence = chunk.sequence
            sampling = sequence.spec.sampling
            if not (chunk.samples or chunk.all_logits):
                continue
            if chunk.all_logits or sequence.edits is not None or sampling.logprobs is not None:
                return 0
            if sampling.temperature > 0:
                if not sampling.top_k:
                    return 0
                most = max(most, sampling.top_k)
        return most

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        samples = num_tokens == sequence.num_missing_tokens
        chunk = Chunk(sequence, num_tokens, samples, sequence.wants_prompt_logits)
        self.chunks.append(chunk)
        self.num_prompt_logits += num_tokens * chunk.all_logits
        before = sequence.num_computed_tokens - sequence.tables.num_evicted_tokens
        contexts = token_contexts(num_tokens, before)
        if sequence.in_decode:
            self.work.decode_tokens += num_tokens
            self.work.decode_contexts += contexts
        else:
            self.work.prefill_tokens += num_tokens
            self.work.prefill_contexts += contexts
            self.num_line_tokens += num_tokens * sequence.spec.is_batch

    def add_ahead(self, sequence: Sequence, place: int | None) -> None:
        """Adds the next token of a decoding sequence to a step that is launched ahead. `place` is
        that of `Chunk`."""
        self.chunks.append(Chunk(sequence, 1, True, False, place))
        self.work.decode_tokens += 1
        # All known tokens are computed when the step starts. The last one is computed by the step
        # itself if it is known.
        self.work.decode_contexts += sequence.num_tokens - (place is None)

    def add_drafts(
        self, place: int, drafts: Collection[int], scratch: Collection[BlockCopy] = ()
    ) -> None:
        """Adds proposed tokens to the chunk at `place`. `scratch` is that of `Chunk`."""
        self.chunks[place] = self.chunks[place]._replace(
            drafts=tuple(drafts), scratch=tuple(scratch)
        )
        self.work.draft_tokens += len(drafts)

    def evict(self) -> None:
        """For each sequence whose KV budget keeps heavy hitters, evicts the blocks with the least
        attention if the sequence has reached an eviction point."""
        for sequence, *_ in self.chunks:
            if sequence.tables.hitters is not None:
                sequence.tables.evict(sequence.num_computed_tokens)
