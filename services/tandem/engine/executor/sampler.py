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
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.schedule import Chunk
from tandem.engine.sequence import Sequence
from tandem.engine.types import TokenLogprobs
from tandem.models.grammars.masks import GrammarMatcher
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.sampling import Draw


class Sampled(NamedTuple):
    """A sampled token, and its log probabilities if they are requested."""

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
    sampling = sequence.spec.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed or 0,
        position=sequence.num_tokens,
        edit=None if sequence.edits is None else sequence.edits.edit(),
    )


class StepSampler:
    """Samples the tokens of one step. Must be created before the step runs, because the step
    changes `num_computed_tokens` of the sequences."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        # The sequences whose next token is sampled, each with the row of logits for this token.
        self._drawn: list[tuple[Sequence, int]] = []
        self._prompts: list[tuple[Sequence, _Wanted]] = []
        num_rows = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.all_logits:
                self._prompts += _prompt_tokens(chunk, num_rows)
                num_rows += chunk.num_tokens
            else:
                num_rows += chunk.samples
            if chunk.samples:
                self._drawn.append((sequence, num_rows - 1))
        self._num_rows = num_rows

    @property
    def grammars(self) -> list[GrammarMatcher]:
        """The grammar matchers of the sequences whose next token is sampled in this step."""
        return [s.grammar for s, _ in self._drawn if s.grammar is not None]

    def skip_late(self) -> None:
        """Samples no token in this step for the sequences whose grammar masks are not ready."""
        self._drawn = [drawn for drawn in self._drawn if not drawn[0].awaits_mask]

    def run(self, runner: Runner, logits: torch.Tensor) -> list[Sampled]:
        """Samples the next tokens and returns them with their log probabilities. Stores the log
        probabilities of prompts, and embeddings, in the sequences."""
        token_ids: list[int] = []
        if self._drawn:
            rows = [row for _, row in self._drawn]
            draws = [next_draw(sequence) for sequence, _ in self._drawn]
            some = rows if len(rows) < self._num_rows else None
            token_ids = runner.sample(logits, draws, some)
        drawn: list[TokenLogprobs | None] = [None] * len(token_ids)
        wanted = [one for _, one in self._prompts]
        places = []
        for place, ((sequence, row), token_id) in enumerate(
            zip(self._drawn, token_ids, strict=True)
        ):
            if (num_top := sequence.spec.sampling.logprobs) is not None:
                places.append(place)
                wanted.append(_Wanted(row, token_id, num_top))
        if wanted:
            found = _measure(runner, logits, wanted)
            for (sequence, _), one in zip(self._prompts, found, strict=False):
                sequence.prompt_logprobs.append(one)
            for place, one in zip(places, found[len(self._prompts) :], strict=True):
                drawn[place] = one
        self._embed(runner)
        return [
            Sampled(sequence, token_id, one)
            for (sequence, _), token_id, one in zip(self._drawn, token_ids, drawn, strict=True)
        ]

    def _embed(self, runner: Runner) -> None:
        """Stores the hidden state of the prompt's last token in each sequence that requests an
        embedding."""
        wanted = [(sequence, row) for sequence, row in self._drawn if sequence.wants_embedding]
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
