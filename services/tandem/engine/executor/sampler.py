"""Samples the tokens of a step, and measures the log probabilities that its sequences request.

The draw of a sequence's token i depends only on the seed and on i. So a sequence that was migrated,
preempted or prefilled on another worker continues with the same tokens. Log probabilities are the
model's own: logit edits change the draw, not the measured log probabilities.

The logits have these rows:

    kind of chunk                    rows
    decode                           1: the next token
    last chunk of a prompt           1: the first token of the completion
    chunk with prompt logprobs       all its tokens; row i has the log probability of token i + 1
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
    """The next token of a sequence."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None


class _Wanted(NamedTuple):
    """A token whose log probability is requested. `num_top` is the number of most likely tokens to
    report in addition."""

    row: int
    token_id: int
    num_top: int


def next_draw(sequence: Sequence) -> Draw:
    """Returns the parameters of the draw for the sequence's next token."""
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
    """The rows of one step's logits and the sequences to which they belong. The object must be
    created before the step, because the step advances the sequences."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        # sequences to sample, each with its row of logits
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
        """The grammars of the sequences to sample."""
        return [s.grammar for s, _ in self._drawn if s.grammar is not None]

    def skip_late(self) -> None:
        """Leaves out the sequences whose grammar masks are not ready. They get no token in this
        step."""
        self._drawn = [drawn for drawn in self._drawn if not drawn[0].awaits_mask]

    def run(self, runner: Runner, logits: torch.Tensor) -> list[Sampled]:
        """Samples a token for each sequence that has a row for it and was not left out. Stores log
        probabilities of prompts in the sequences."""
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
    """Yields the prompt tokens that the chunk's logits predict, except tokens that an earlier step
    measured."""
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
