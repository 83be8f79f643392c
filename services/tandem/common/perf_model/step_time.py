"""The step-time model of an engine. It predicts how much prefill fits into a step beside decode.

    step   |-- decode of all running sequences --|-- chunks of prompts --|
           0                                                             at most the limit

The limit is `_MARGIN` (0.9) times the target time between two tokens, or 1.5 times the predicted
decode time if that is more. So prompts get at least a third of the step and never starve. Example:
with a target of 100 ms, decode of 40 ms leaves 90 - 40 = 50 ms for chunks, and decode of 80 ms
leaves 120 - 80 = 40 ms. Steps without decode have no limit here. They use the scheduler's whole
budget.

The duration of a step is predicted with numbers that are fitted to measured steps. In the formulas,
"contexts" is the sum, over the computed tokens, of the number of tokens before each:

    prefill only   step_s + P,  where P = token_s * tokens + token_context_s * contexts
    decode only    D = step_s + sequence_s * sequences + context_s * contexts
    mixed          D + a * P,  where D also counts the mean context of the chunk's tokens

step_s of prefill and step_s of decode are two numbers. The number `a` is the cost of prefill tokens
beside decode, relative to their cost in large chunks. `a` is below 1 while prefill and decode wait
for the same weights. It is fitted to recent mixed steps and is 1 before the first mixed step.

If several mixed steps in a row are slower than the largest allowed `a` explains, the whole machine
has become slower, and all numbers are scaled. Without this rule, a worker whose prompts always wait
would only have mixed steps. It could not notice the change, and its chunks would shrink until
prompts starve.

So a worker needs no setting of the chunk size for its role, because the chunk size follows from its
work. With `--numerics invariant` the generated tokens do not depend on the size of a chunk.

Only this module fits a worker's speed; the worker reports the result as `WorkerRates`. The reported
prefill rate covers all steps with a prompt, minus the time of the decoding sequences, because other
processes predict the duration of a prompt and not the size of a chunk.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem.common.perf_model.meters import SECONDS_MAX, LinearMeter
from tandem.common.perf_model.rates import (
    DEFAULT_DECODE,
    DEFAULT_PREFILL,
    DecodeRate,
    PrefillRate,
    WorkerRates,
)

# Steps are planned for this fraction of the target time. Predictions are means, so about half of
# the steps take longer than predicted.
_MARGIN = 0.9
# Number of steps with prefill after which the fitted rates count as measured. Before, up to three
# slow first steps may make the fit a hundred times too slow.
_MEASURED_AFTER = 8
_DECODE_SHARE = 1.5  # a mixed step may always take 1.5 times the predicted decode time
# The number of tokens in a mixed step is rounded down to a multiple of this, so that kernels have
# full tiles and few different shapes.
_ROWS = 16
_TOKENS_MIN = 4  # smallest number of prefill tokens in a mixed step
# A chunk has at most about twice as many tokens as the last one, in case the prediction is wrong.
_GROWTH = 2
_COST_MIN = 0.1  # smallest value of `a`, the relative cost of a prefill token beside decode
# Largest plausible `a`. It may exceed 1: a small chunk also reads the KV of all tokens before it.
_COST_MAX = 4.0
# A mixed step counts as slow if it takes longer than 1.5 times the predicted decode time, plus
# `_COST_MAX` times the predicted time of its chunks alone.
_SLOWER = 1.5
_CHANGE_AFTER = 4  # number of slow mixed steps in a row after which the machine counts as slower
# In the reported prefill rate, at least this fraction of a mixed step's time counts as prefill.
_PREFILL_SHARE_MIN = 0.1
# With each new mixed step, the weight of the earlier ones is multiplied by this. With 0.8, `a`
# depends mainly on the last 5 mixed steps.
_COST_KEEP = 0.8
_OUTLIER = 3.0  # the time of a chunk counts as at most 3 times the predicted time
# Assumed time that proposed tokens add to a step before this was measured, as parts of the step's
# predicted time: for the first token, and for each.
_DRAFT_FIXED = 0.1
_DRAFT_TOKEN = 0.1
# With each step that skips proposed tokens for their price, the price is multiplied by this. So a
# price that is three times too high is measured again after about 110 steps.
_DRAFT_KEEP = 0.99
# Number of steps with proposed tokens in a row after which the duration of a step without them is
# measured again.
_DRAFTED_MAX = 64
_DECODE_CONTEXT_S = DEFAULT_PREFILL.token_context_s


@dataclass(slots=True)
class StepWork:
    """The work of a step. `prefill_contexts` is the sum, over the prefilled tokens, of the number
    of tokens before each: 10 + 11 + 12 for a chunk of 3 tokens after 10. `decode_contexts` is the
    same sum for the decoded tokens."""

    prefill_tokens: int = 0
    prefill_contexts: int = 0
    decode_tokens: int = 0
    decode_contexts: int = 0
    draft_tokens: int = 0  # proposed tokens, besides the tokens above

    @property
    def num_tokens(self) -> int:
        """Total number of tokens; 0 for a step that computed nothing."""
        return self.prefill_tokens + self.decode_tokens


class DraftPrice(NamedTuple):
    """Predicted duration of a step without proposed tokens, and what proposed tokens add to it: a
    fixed time for the first, and a time for each. All in seconds."""

    step_s: float
    fixed_s: float
    token_s: float
    most_s: float = math.inf  # proposed tokens may add so much


class StepTimeModel:
    """The step-time model of one engine, which limits the chunks of prompts beside decode."""

    def __init__(self, itl_target_s: float) -> None:
        """`itl_target_s` is the target time between two tokens; 0 means no limit."""
        self._target_s = itl_target_s
        guess = msgspec.structs.astuple(DEFAULT_PREFILL)
        # Cost of prefill in large chunks, fitted to the steps without decode. The sizes of chunks
        # are computed from it.
        self._prefill = LinearMeter(guess)
        # Cost of prefill that the worker reports, fitted to all steps with prefill.
        self._reported = LinearMeter(guess)
        self._decode = LinearMeter(
            (DEFAULT_DECODE.step_s, DEFAULT_DECODE.sequence_s, _DECODE_CONTEXT_S)
        )
        # Added time of proposed tokens, fitted to the decode-only steps with such tokens.
        self._drafts: LinearMeter | None = None
        # Number of steps with proposed tokens since the last decode-only step without them.
        self._num_drafted = 0
        self._beside_decode = _CostBesideDecode()
        self._num_slower = 0  # number of slow mixed steps in a row
        self._last_tokens: int | None = None  # number of prefill tokens in the last mixed step
        # Mean length of the contexts of the sequences in the last decode-only step, in tokens.
        self._mean_context = 0.0

    @property
    def prefill_rate(self) -> PrefillRate | None:
        """Rate of prefill-only steps; None before the first one."""
        fit = self._prefill
        return PrefillRate(*fit.coefficients) if fit.num_observations else None

    @property
    def decode_rate(self) -> DecodeRate | None:
        """Rate of decode-only steps; None before the first one. The rate depends on the length of
        sequences, and applies to the mean length in the last decode-only step."""
        if not self._decode.num_observations:
            return None
        step_s, sequence_s, context_s = self._decode.coefficients
        return DecodeRate(step_s, sequence_s + context_s * self._mean_context)

    @property
    def has_measured_prefill(self) -> bool:
        """True once enough steps with prefill were measured to predict the time of others."""
        return self._reported.num_observations >= _MEASURED_AFTER

    def rates(self, unmeasured: WorkerRates) -> WorkerRates:
        """Returns a copy of `unmeasured` with the fitted prefill and decode rates, for the worker's
        report. The decode rate is a default until the first decode-only step."""
        return msgspec.structs.replace(
            unmeasured,
            prefill=PrefillRate(*self._reported.coefficients),
            decode=self.decode_rate or DEFAULT_DECODE,
            measured=self.has_measured_prefill,
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Adds a measured step. Implausible durations are ignored."""
        if not 0 < seconds < SECONDS_MAX:
            return
        prefill = (work.prefill_tokens, work.prefill_contexts)
        decode = (work.decode_tokens, work.decode_contexts)
        if work.draft_tokens:
            self._num_drafted += 1
            self._observe_drafts(work, seconds)
            return
        if prefill[0]:
            decode_s = decode[0] * (self.decode_rate or DEFAULT_DECODE).sequence_s
            left_s = max(seconds - decode_s, _PREFILL_SHARE_MIN * seconds)
            self._reported.observe((1.0, *prefill), left_s)
        if prefill[0] and decode[0]:
            around_s = self._decode_s(decode[0], decode[1] + prefill[1] // prefill[0])
            self._observe_mixed(seconds, around_s, self._prefill_s(*prefill))
            self._last_tokens = prefill[0]
        elif prefill[0]:
            self._prefill.observe((1.0, *prefill), seconds)
        elif decode[0]:
            self._num_drafted = 0
            self._decode.observe((1.0, *decode), seconds)
            self._mean_context = decode[1] / decode[0]

    def draft_price(self, work: StepWork) -> DraftPrice | None:
        """Returns the price of proposed tokens in a step with `work`, which has no prompt. Returns
        None if the step is to be measured without proposed tokens: before the first decode-only
        step, and after many steps with such tokens.

        With proposed tokens, a step may not exceed the target time, unless it does without them.
        """
        if not self._decode.num_observations or self._num_drafted >= _DRAFTED_MAX:
            return None
        step_s = self._decode_s(work.decode_tokens, work.decode_contexts)
        fixed_s, token_s = _DRAFT_FIXED * step_s, _DRAFT_TOKEN * step_s
        if self._drafts is not None:
            fixed_s, token_s = self._drafts.coefficients
        left_s = _MARGIN * self._target_s - step_s
        return DraftPrice(step_s, fixed_s, token_s, left_s if left_s > 0 else math.inf)

    def skip_drafts(self, work: StepWork) -> None:
        """Records that a step with `work` verifies no proposed tokens, because they cost too much.

        A price above the assumed one falls a little, so that it is measured again after a while.
        """
        price = self.draft_price(work)
        if self._drafts is not None and price is not None:
            assumed_s = (_DRAFT_FIXED + _DRAFT_TOKEN) * price.step_s
            if price.fixed_s + price.token_s > assumed_s:
                self._drafts.stretch(_DRAFT_KEEP)

    def _observe_drafts(self, work: StepWork, seconds: float) -> None:
        """Adds a decode-only step with proposed tokens."""
        step_s = self._decode_s(work.decode_tokens, work.decode_contexts)
        if self._drafts is None:
            self._drafts = LinearMeter((_DRAFT_FIXED * step_s, _DRAFT_TOKEN * step_s))
        fixed_s, token_s = self._drafts.coefficients
        # A step that the machine's scheduler interrupted must not make proposed tokens so expensive
        # that none is tried again.
        most_s = max(fixed_s + work.draft_tokens * token_s, (_DRAFT_FIXED + _DRAFT_TOKEN) * step_s)
        added_s = min(seconds - step_s, _OUTLIER * most_s)
        self._drafts.observe((1.0, work.draft_tokens), step_s + added_s, known_s=step_s)

    def chunk_max(self, work: StepWork, context: int) -> int | None:
        """Returns the largest number of tokens of a prompt that may be added, as one chunk, to a
        step that already has `work`.

        The chunk follows `context` other tokens of its prompt. None means that only the scheduler's
        budget limits the chunk.
        """
        if not self._target_s or not work.decode_tokens:
            return None
        alone_s = self._decode_s(work.decode_tokens, work.decode_contexts)
        left_s = max(_MARGIN * self._target_s, _DECODE_SHARE * alone_s)
        left_s -= self._decode_s(work.decode_tokens, work.decode_contexts + context)
        cost = self._beside_decode.cost
        # A chunk costs less beside decode because it shares the read of the weights with decode. A
        # chunk of more than `_ROWS` tokens gains nothing from that.
        if (self._last_tokens or 0) > _ROWS:
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
        """Adds a mixed step that took `seconds`. `around_s` is the predicted time of the step's
        decode, and `alone_s` the predicted time of its chunks in a step without decode."""
        is_slower = seconds > _SLOWER * around_s + _COST_MAX * alone_s
        self._num_slower = self._num_slower + 1 if is_slower else 0
        if self._num_slower < _CHANGE_AFTER:
            self._beside_decode.observe(seconds - around_s, alone_s)
            return
        times = seconds / (around_s + alone_s)
        for meter in (self._decode, self._prefill, self._reported):
            meter.stretch(times)
        self._beside_decode = _CostBesideDecode()
        self._num_slower = 0

    def _prefill_s(self, num_tokens: int, contexts: int) -> float:
        """Predicts the seconds of prefill in large chunks, without a step's fixed cost."""
        _, token_s, context_s = self._prefill.coefficients
        return num_tokens * token_s + contexts * context_s

    def _decode_s(self, num_sequences: int, contexts: int) -> float:
        step_s, sequence_s, context_s = self._decode.coefficients
        return step_s + num_sequences * sequence_s + contexts * context_s


class _CostBesideDecode:
    """The number `a` of the module's docstring: the cost of prefill in mixed steps, relative to the
    cost of the same prefill in large chunks.

    The cost is a ratio of two sums over the last steps. The ratio of a single step would be
    useless: it is even negative if the step takes less time than was predicted for its decode
    alone.
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
    """Returns the number n for which n * first_s + n * n * growth_s = `seconds`, rounded down.
    Returns None if tokens cost nothing."""
    if seconds <= 0:
        return 0
    # The solution of the quadratic equation in a form that is also valid for growth_s = 0.
    divisor = first_s + math.sqrt(first_s * first_s + 4 * growth_s * seconds)
    return int(2 * seconds / divisor) if divisor > 0 else None
