"""Speculative decoding of one engine: which sequences speculate, and how much.

A step that speculates computes the last token of a sequence and the proposed tokens after it, as
one small chunk of a prompt, with logits for each token. Then the engine samples the sequence's own
next token from the first row, with the same random number, mask and penalties as without
speculation. While the sampled token equals the proposed one, the engine goes on with the next row:

    computed     t9   p1   p2   p3      t9: last known token; p1 to p3: proposed
    sampled      p1   p2   x            x is the first token that differs
    result       t9   p1   p2 | x       3 new tokens; the KV of t9, p1 and p2 counts as computed

So the proposals change only the number of steps. The KV of p3 is not counted, hashed or shared. It
is overwritten when the token in its place is computed.

A state cannot drop a token. So in a model with states, the step computes on a copy of the running
state, in a scratch slot. If all proposed tokens are accepted, the copy becomes the running state.
Otherwise it is dropped, none of the step's tokens counts as computed, and the next step computes
the accepted ones again, from the running state on:

    first step   running state after t8, copy after t9 p1 p2 p3; accepted p1 and p2, sampled x
    next step    running state after t8: computes t9 p1 p2 x, and samples the token after x
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tandem.common.perf_model.step_time import DraftPrice, StepTimeModel, StepWork
from tandem.common.speculation import Speculated, Speculation, SpeculationStats
from tandem.engine.speculation.acceptance import DRAFT_MODEL, Acceptance
from tandem.engine.speculation.depth import num_worthwhile
from tandem.engine.speculation.drafter import Drafter, Proposer
from tandem.engine.speculation.model_drafter import ModelDrafter
from tandem.engine.speculation.recent_answers import RecentAnswers, Tenant
from tandem.engine.types import Mode, SequenceSpec

# A model with states computes accepted tokens again, unless all proposed tokens are accepted. So
# each proposed token counts as two.
_TIMES_WITH_STATES = 2


class Speculator:
    def __init__(
        self,
        setting: Speculation | None,
        step_time: StepTimeModel,
        max_model_len: int,
        *,
        has_states: bool = False,
    ) -> None:
        """`setting` None: no sequence speculates."""
        self._setting = setting
        self._step_time = step_time
        self._max_model_len = max_model_len
        self._has_states = has_states
        has_model = setting is not None and setting.method == "draft_model"
        self._acceptance = Acceptance(assumed=DRAFT_MODEL) if has_model else Acceptance()
        self._recent: RecentAnswers | None = None  # None: proposals come from own tokens only
        if setting is not None and setting.answers_max:
            self._recent = RecentAnswers(
                num_tokens=setting.match_min,
                context=setting.match_max,
                answers_max=setting.answers_max,
            )
        self._price: DraftPrice | None = None  # the price in the step that was planned last
        self.stats = None if setting is None else SpeculationStats()  # None: none speculates

    @property
    def tokens_max(self) -> int:
        """Largest number of tokens in a proposal."""
        return 0 if self._setting is None else self._setting.tokens_max

    def drafter(self, spec: SequenceSpec) -> Proposer | None:
        """Returns what proposes tokens of a sequence. Returns None if the sequence does not
        speculate.

        A sequence with a KV budget does not, because a rejected token would change which keys the
        budget keeps. A sequence that a peer decodes has nothing to propose.
        """
        is_plain = spec.kv_budget is None and spec.mode is not Mode.PREFILL_ONLY
        if self._setting is None or not is_plain:
            return None
        if self._setting.method == "draft_model":
            return ModelDrafter(self._acceptance, spec, self._max_model_len)
        return Drafter(self._setting, self._acceptance, spec, self._max_model_len, self._recent)

    def keep(self, spec: SequenceSpec, token_ids: Sequence[int]) -> None:
        """Keeps the answer of a sequence that has ended, for the proposals of other sequences.
        `token_ids` are the tokens of the sequence."""
        if self._recent is not None:
            self._recent.add(Tenant.of(spec), token_ids, spec.num_prompt_tokens)

    def forget(self) -> None:
        """Drops the answers that are kept."""
        if self._recent is not None:
            self._recent.clear()

    def num_worthwhile(self, gains: Sequence[float], work: StepWork) -> int:
        """Returns how many proposed tokens are worth their time in a step with `work`. `gains` has
        their probabilities in descending order."""
        self._price = price = self.price(work)
        if price is None or not price.step_s:
            return 0
        count = num_worthwhile(gains, num_sequences=work.decode_tokens, price=price)
        if not count:
            self._step_time.skip_drafts(work)
        return count

    def price(self, work: StepWork) -> DraftPrice | None:
        """Returns the price of proposed tokens in a step with `work`. None: the step is to be
        measured without them."""
        price = self._step_time.draft_price(work)
        if price is not None and self._has_states:
            price = price._replace(token_s=_TIMES_WITH_STATES * price.token_s)
        return price

    def skip(self, work: StepWork) -> None:
        """Records that a step with `work` verifies no proposed tokens, because they do not pay."""
        self._step_time.skip_drafts(work)

    def charge(self, drafter: Proposer, seconds: float) -> None:
        """Counts the seconds that a draft model has computed for a sequence."""
        before = drafter.result
        drafter.result = replace(before, saved_s=before.saved_s - seconds)

    def count(self, drafter: Proposer, num_accepted: int, num_proposed: int, of_step: int) -> None:
        """Counts the proposed tokens that a step has verified for one sequence. The step had
        `of_step` proposed tokens of all sequences."""
        if self.stats is None:
            return
        self.stats.count(num_proposed, num_accepted)
        saved_s = 0.0
        if (price := self._price) is not None:
            # Without proposals, each accepted token would have taken one more step.
            saved_s = num_accepted * price.step_s - price.fixed_s - of_step * price.token_s
        before = drafter.result
        drafter.result = Speculated(
            before.proposed_tokens + num_proposed,
            before.accepted_tokens + num_accepted,
            before.saved_s + saved_s,
        )
