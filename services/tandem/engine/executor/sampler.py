"""Samples the next tokens of a step's sequences, and computes the log probabilities that clients
request.

The random number for token i of a sequence depends only on the seed and on i. So a sequence that
was migrated, preempted or prefilled on another worker continues with the same tokens. Log
probabilities are computed from the model's logits before logit edits.

A step has a chunk of tokens of each sequence. The number of rows of logits for a chunk depends on
the chunk:

    chunk                                rows of logits
    one token of a decoding sequence     1, from which the next token is sampled
    last chunk of a prompt               1, from which the first completion token is sampled
    earlier chunk of a prompt            0
    chunk of a prompt whose log          one for each token of the chunk; the row of token i has the
      probabilities are requested          log probability of token i + 1
    chunk with proposed tokens           1, from which the next token is sampled, and one for each
      (speculator.py)                      proposed token, from which the token after it is sampled
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from tandem.engine.runner_protocol import DrawnTokens, Runner
from tandem.engine.scheduler.schedule import Chunk
from tandem.engine.sequence import Sequence
from tandem.engine.types import TokenLogprobs
from tandem.models.grammars.masks import GrammarMatcher
from tandem_kernels.edits import Edit
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.sampling import NO_TOKEN, Draw


class Sampled(NamedTuple):
    """A sampled token, and its log probabilities if they are requested. The token is NO_TOKEN if a
    logit was NaN or infinite."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None


class _Wanted(NamedTuple):
    """A request for the log probability of a token and of the `num_top` most likely tokens, all
    computed from row `row` of the logits."""

    row: int
    token_id: int
    num_top: int


def next_draw(sequence: Sequence) -> Draw:
    """Returns the sampling parameters for the sequence's next token."""
    edit = None if sequence.edits is None else sequence.edits.edit()
    return _draw(sequence, edit)


def guessed_draw(sequence: Sequence) -> Draw:
    """Returns the sampling parameters with which a draft model guesses the sequence's next tokens.
    They leave out the mask of a grammar, which need not be ready."""
    if sequence.edits is None or sequence.grammar is not None:
        return _draw(sequence, None)
    return _draw(sequence, sequence.edits.edit())


def _draw(sequence: Sequence, edit: Edit | None) -> Draw:
    sampling = sequence.spec.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed or 0,
        position=sequence.num_tokens,
        edit=edit,
    )


class _Drawn(NamedTuple):
    """A sequence whose next token is sampled."""

    sequence: Sequence
    row: int  # the row of logits for the token
    drafts: tuple[int, ...] = ()  # the tokens that are proposed for the next rows


# The draw of a row whose token is not used: the cheapest one.
_UNUSED = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


class StepSampler:
    """Samples the tokens of one step. Must be created before the tokens of the step count as
    computed."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._drawn: list[_Drawn] = []
        self._prompts: list[tuple[Sequence, _Wanted]] = []
        self._tokens: DrawnTokens | None = None
        self._places: list[int] = []  # the place of each drawn token among the sampled tokens
        num_rows = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.all_logits:
                self._prompts += _prompt_tokens(chunk, num_rows)
                num_rows += chunk.num_tokens
            else:
                num_rows += chunk.samples
            if chunk.samples:
                self._drawn.append(_Drawn(sequence, num_rows - 1, chunk.drafts))
            num_rows += len(chunk.drafts)
        self._num_rows = num_rows
        self._proposals = {each.sequence: each for each in self._drawn if each.drafts}

    @classmethod
    def of_ahead(cls, chunks: Iterable[Chunk], live: Collection[Sequence]) -> StepSampler:
        """Returns the sampler of a step that was launched ahead. Each chunk has one row of logits.
        Only the tokens of the sequences in `live` are sampled."""
        sampler = cls([])
        for row, chunk in enumerate(chunks):
            sampler._num_rows = row + 1
            if chunk.sequence in live:
                sampler._drawn.append(_Drawn(chunk.sequence, row))
        return sampler

    @property
    def grammars(self) -> list[GrammarMatcher]:
        """The grammar matchers of the sequences whose next token is sampled in this step."""
        return [each.sequence.grammar for each in self._drawn if each.sequence.grammar is not None]

    def skip_late(self) -> None:
        """Samples no token in this step for the sequences whose grammar masks are not ready."""
        self._drawn = [drawn for drawn in self._drawn if not drawn.sequence.awaits_mask]

    @property
    def has_proposals(self) -> bool:
        """True if a chunk has proposed tokens."""
        return bool(self._proposals)

    def is_proposed(self, one: Sampled) -> bool:
        """Returns whether a sampled token is the one that was proposed in its place."""
        proposal = self._proposals.get(one.sequence)
        return proposal is not None and proposal.drafts[:1] == (one.token_id,)

    def go_on(self, sequences: Iterable[Sequence]) -> None:
        """Prepares to sample the next token of these sequences, whose proposed token is accepted,
        from the row of this token. The accepted token must have been appended."""
        self._drawn = []
        self._prompts = []
        self._tokens = None
        self._places = []
        for sequence in sequences:
            _, row, drafts = self._proposals[sequence]
            self._proposals[sequence] = _Drawn(sequence, row + 1, drafts[1:])
            self._drawn.append(self._proposals[sequence])

    @property
    def needs_logits(self) -> bool:
        """True if `finish` still reads the logits or hidden states of the step."""
        return bool(self._prompts) or any(
            each.sequence.spec.sampling.logprobs is not None or each.sequence.wants_embedding
            for each in self._drawn
        )

    def start(self, runner: Runner, logits: torch.Tensor) -> dict[str, int]:
        """Starts to sample the next tokens. Maps the id of each sequence whose token is sampled to
        the token's place among the sampled tokens."""
        rows = [each.row for each in self._drawn]
        draws = [next_draw(each.sequence) for each in self._drawn]
        if (self._prompts or self._proposals) and draws:
            self._places = list(range(len(rows)))
            self._tokens = runner.start_sampling(logits, draws, rows)
        elif draws:
            # A token for each row, because selecting rows on a device takes longer.
            self._places = rows
            by_row = dict(zip(rows, draws, strict=True))
            all_draws = [by_row.get(row, _UNUSED) for row in range(self._num_rows)]
            self._tokens = runner.start_sampling(logits, all_draws)
        names = (each.sequence.sequence_id for each in self._drawn)
        return dict(zip(names, self._places, strict=True))

    def finish(self, runner: Runner, logits: torch.Tensor) -> list[Sampled]:
        """Waits for the sampled tokens and returns them with their log probabilities. Stores the
        log probabilities of prompts, and embeddings, in the sequences."""
        tokens = self._tokens.wait() if self._tokens is not None else []
        token_ids = [tokens[place] for place in self._places]
        drawn: list[TokenLogprobs | None] = [None] * len(token_ids)
        wanted = [one for _, one in self._prompts]
        places = []
        for place, (each, token_id) in enumerate(zip(self._drawn, token_ids, strict=True)):
            num_top = each.sequence.spec.sampling.logprobs
            if num_top is not None and token_id != NO_TOKEN:
                places.append(place)
                wanted.append(_Wanted(each.row, token_id, num_top))
        if wanted:
            found = _measure(runner, logits, wanted)
            for (sequence, _), one in zip(self._prompts, found, strict=False):
                sequence.prompt_logprobs.append(one)
            for place, one in zip(places, found[len(self._prompts) :], strict=True):
                drawn[place] = one
        self._embed(runner)
        return [
            Sampled(each.sequence, token_id, one)
            for each, token_id, one in zip(self._drawn, token_ids, drawn, strict=True)
        ]

    def _embed(self, runner: Runner) -> None:
        """Stores the hidden state of the prompt's last token in each sequence that requests an
        embedding."""
        wanted = [(s, row) for s, row, _ in self._drawn if s.wants_embedding]
        if wanted:
            found = runner.final_hidden([row for _, row in wanted])
            for (sequence, _), embedding in zip(wanted, found, strict=True):
                sequence.embedding = embedding


def _prompt_tokens(chunk: Chunk, first_row: int) -> Iterable[tuple[Sequence, _Wanted]]:
    """Yields a request for each prompt token whose log probability can be computed from the chunk's
    logits. Tokens whose log probability is already stored in the sequence are left out."""
    sequence = chunk.sequence
    num_top = sequence.spec.sampling.prompt_logprobs
    assert num_top is not None
    start = sequence.num_computed_tokens
    for index in range(chunk.num_tokens):
        position = start + index + 1
        if len(sequence.prompt_logprobs) < position < sequence.spec.num_prompt_tokens:
            yield sequence, _Wanted(first_row + index, sequence.token_ids[position], num_top)


def _measure(runner: Runner, logits: torch.Tensor, wanted: list[_Wanted]) -> list[TokenLogprobs]:
    rows, token_ids, nums_top = zip(*wanted, strict=True)
    found: Logprobs = runner.logprobs(logits, rows, token_ids, max(nums_top))
    columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    return [
        TokenLogprobs(logprob, rank, top_ids[:num_top], top_logprobs[:num_top])
        for num_top, logprob, rank, top_ids, top_logprobs in zip(
            nums_top, *(column.tolist() for column in columns), strict=True
        )
    ]
