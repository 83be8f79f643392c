"""The step-time model is fitted to an engine's steps; it says how much prefill fits beside decode.

    step   |-- decode, all of it --|-- chunks of prompts --|
           0                                               at most the limit

The limit is the wanted time between two tokens; where decoding alone takes most of it, half as much
again as decoding takes, so that prompts get a third of the time at least and never starve. A
step's seconds are predicted from steps measured here:

    step_s + token_s * tokens + token_context_s * (tokens before each)        one that only prefills
    step_s + sequence_s * sequences + context_s * (tokens before each)        one that only decodes
    (the second, with the chunk's context) + a * (the first, without step_s)  a mixed one

`a` says what tokens cost beside decoding, of what they cost in large chunks: less while their
products wait for the same weights. It is that of the last mixed steps, and 1 before there was one.
Several mixed steps in a row that take longer than any such cost explains say that the whole machine
became slower: where prompts always wait, no step that only decodes or only prefills would tell, and
chunks would shrink until prompts starve. Steps without decode are not limited here: they take the
scheduler's whole budget.

So a role needs no setting: what a worker computes says it. Which tokens come out never depends on a
chunk's size with `--numerics invariant`.

This is the one place that fits a worker's speed: the worker tells the result to others as
`WorkerRates`. Its prefill rate is of all steps with a prompt, less what each decoding sequence
adds: others ask how long a prompt takes, and not which chunk fits.
"""

import math
from dataclasses import dataclass

import msgspec

from tandem.common.perf_model.meters import SECONDS_MAX, LinearMeter
from tandem.common.perf_model.rates import (
    DEFAULT_DECODE,
    DEFAULT_PREFILL,
    DecodeRate,
    PrefillRate,
    WorkerRates,
)

_MARGIN = 0.9  # of the limit: the fit is of the mean, and a step in two takes longer
_DECODE_SHARE = 1.5  # of what decode alone takes, that a step may always take
_ROWS = 16  # of a step, that it has a multiple of: few shapes, and the kernels' tiles are full
_TOKENS_MIN = 4  # of prefill in a step, whatever it takes
_GROWTH = 2  # times the chunk before: a fit that went astray is found out before it hurts
_COST_MIN = 0.1  # of what a token costs in large chunks: nothing is for nothing
_COST_MAX = 4.0  # a few tokens after many: a chunk reads all KV before it once more
_SLOWER = 1.5  # times what decoding alone was expected to take: noise is less
_CHANGE_AFTER = 4  # mixed steps in a row
_PREFILL_SHARE_MIN = 0.1  # of a mixed step, whatever its decode part is predicted to take
_COST_KEEP = 0.8  # of what mixed steps say, for each that follows: the last 5 count
_OUTLIER = 3.0  # times what was expected: what a step took beyond that is the machine's doing
_DECODE_CONTEXT_S = DEFAULT_PREFILL.token_context_s


@dataclass(slots=True)
class StepWork:
    """Tokens of a step; contexts are the tokens before each of them, summed."""

    prefill_tokens: int = 0
    prefill_contexts: int = 0
    decode_tokens: int = 0
    decode_contexts: int = 0

    @property
    def num_tokens(self) -> int:
        """A step without tokens computed nothing."""
        return self.prefill_tokens + self.decode_tokens


class StepTimeModel:
    """The step-time model of one engine: measured steps, and the chunks that follow from them."""

    def __init__(self, itl_target_s: float) -> None:
        """`itl_target_s`: 0 limits nothing."""
        self._target_s = itl_target_s
        guess = msgspec.structs.astuple(DEFAULT_PREFILL)
        self._prefill = LinearMeter(guess)  # of steps that only prefill: a large chunk's price
        self._told = LinearMeter(guess)  # of all steps that prefill
        self._decode = LinearMeter(
            (DEFAULT_DECODE.step_s, DEFAULT_DECODE.sequence_s, _DECODE_CONTEXT_S)
        )
        self._beside_decode = _CostBesideDecode()
        self._num_slower = 0  # mixed steps in a row
        self._last_tokens: int | None = None  # of prefill in the last mixed step
        self._mean_context = 0.0  # of a sequence in the last step that only decoded

    @property
    def prefill_rate(self) -> PrefillRate | None:
        """Rate of steps that only prefill; None before the first."""
        fit = self._prefill
        return PrefillRate(*fit.coefficients) if fit.num_observations else None

    @property
    def decode_rate(self) -> DecodeRate | None:
        """Rate of steps that only decode, sequences as long as in the last; None before one."""
        if not self._decode.num_observations:
            return None
        step_s, sequence_s, context_s = self._decode.coefficients
        return DecodeRate(step_s, sequence_s + context_s * self._mean_context)

    @property
    def has_measured_prefill(self) -> bool:
        return self._told.num_observations > 0

    def rates(self, unmeasured: WorkerRates) -> WorkerRates:
        """The worker tells these rates; the decode rate is a guess until a step only decoded."""
        return msgspec.structs.replace(
            unmeasured,
            prefill=PrefillRate(*self._told.coefficients),
            decode=self.decode_rate or DEFAULT_DECODE,
            measured=self._told.num_observations > 0,
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step that was made. Time that no clock can have shown is left out."""
        if not 0 < seconds < SECONDS_MAX:
            return
        prefill = (work.prefill_tokens, work.prefill_contexts)
        decode = (work.decode_tokens, work.decode_contexts)
        if prefill[0]:
            decode_s = decode[0] * (self.decode_rate or DEFAULT_DECODE).sequence_s
            left_s = max(seconds - decode_s, _PREFILL_SHARE_MIN * seconds)
            self._told.observe((1.0, *prefill), left_s)
        if prefill[0] and decode[0]:
            around_s = self._decode_s(decode[0], decode[1] + prefill[1] // prefill[0])
            self._observe_mixed(seconds, around_s, self._prefill_s(*prefill))
            self._last_tokens = prefill[0]
        elif prefill[0]:
            self._prefill.observe((1.0, *prefill), seconds)
        elif decode[0]:
            self._decode.observe((1.0, *decode), seconds)
            self._mean_context = decode[1] / decode[0]

    def chunk_max(self, work: StepWork, context: int) -> int | None:
        """Tokens that the next chunk may have, after `context` others, in a step that has `work`
        already. None: as many as its budget has room for."""
        if not self._target_s or not work.decode_tokens:
            return None
        alone_s = self._decode_s(work.decode_tokens, work.decode_contexts)
        left_s = max(_MARGIN * self._target_s, _DECODE_SHARE * alone_s)
        left_s -= self._decode_s(work.decode_tokens, work.decode_contexts + context)
        cost = self._beside_decode.cost
        if (self._last_tokens or 0) > _ROWS:  # larger ones wait for no weights: nothing is cheaper
            cost = max(cost, 1.0)
        left_s /= cost
        left_s -= self._prefill_s(work.prefill_tokens, work.prefill_contexts)
        _, token_s, context_s = self._prefill.coefficients
        fits = _tokens_in(left_s, token_s + context * context_s, context_s / 2)
        if fits is None:
            return None
        if self._last_tokens is not None:
            fits = min(fits, _GROWTH * self._last_tokens + _ROWS)
        rows = work.prefill_tokens + work.decode_tokens
        whole = (rows + fits) // _ROWS * _ROWS - rows
        if whole > 0:
            return whole
        if work.prefill_tokens >= _TOKENS_MIN:
            return 0
        return max(fits, _TOKENS_MIN - work.prefill_tokens)

    def _observe_mixed(self, seconds: float, around_s: float, alone_s: float) -> None:
        """Learns from a mixed step, expected to take `around_s` and its chunk alone `alone_s`."""
        is_slower = seconds > _SLOWER * around_s + _COST_MAX * alone_s
        self._num_slower = self._num_slower + 1 if is_slower else 0
        if self._num_slower < _CHANGE_AFTER:
            self._beside_decode.observe(seconds - around_s, alone_s)
            return
        times = seconds / (around_s + alone_s)
        for meter in (self._decode, self._prefill, self._told):
            meter.stretch(times)
        self._beside_decode = _CostBesideDecode()
        self._num_slower = 0

    def _prefill_s(self, num_tokens: int, contexts: int) -> float:
        """Predicts seconds of prefill in large chunks, without a step's fixed cost."""
        _, token_s, context_s = self._prefill.coefficients
        return num_tokens * token_s + contexts * context_s

    def _decode_s(self, num_sequences: int, contexts: int) -> float:
        step_s, sequence_s, context_s = self._decode.coefficients
        return step_s + num_sequences * sequence_s + contexts * context_s


class _CostBesideDecode:
    """Cost of prefill in mixed steps, relative to its cost alone in large chunks.

    A ratio of sums: a step may well take less than was predicted for its decoding alone, and that
    counts as much as what another one takes too long.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._alone_s = 0.0
        self.cost = 1.0

    def observe(self, spent_s: float, alone_s: float) -> None:
        self._spent_s = _COST_KEEP * self._spent_s + min(spent_s, _OUTLIER * self.cost * alone_s)
        self._alone_s = _COST_KEEP * self._alone_s + alone_s
        if self._alone_s > 0:
            self.cost = max(_COST_MIN, self._spent_s / self._alone_s)


def _tokens_in(seconds: float, first_s: float, growth_s: float) -> int | None:
    """The n that take `seconds`: n * first_s + n * n * growth_s. None: tokens cost nothing."""
    if seconds <= 0:
        return 0
    # From the quadratic formula, in the form that also holds for growth_s = 0.
    divisor = first_s + math.sqrt(first_s * first_s + 4 * growth_s * seconds)
    return int(2 * seconds / divisor) if divisor > 0 else None
