"""Proposals of tests, which are partly wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tandem.common.perf_model.step_time import StepWork
from tandem.common.speculation import Speculated, SpeculationStats
from tandem.engine.engine import Engine
from tandem.engine.executor.draft_model import DraftModel
from tandem.engine.speculation.draft_plan import READY_TOKENS, Candidate, DraftPlan
from tandem.engine.speculation.drafter import NOTHING, Proposal
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.types import Mode, SequenceSpec

# Returns the tokens that follow a sequence's tokens, up to and without its last token.
Oracle = Callable[[SequenceSpec, Sequence[int]], Sequence[int]]


class ScriptedDrafter:
    """Proposes some of the tokens that an oracle expects. Each may be replaced by a wrong one."""

    def __init__(
        self,
        spec: SequenceSpec,
        oracle: Oracle,
        rng: random.Random,
        wrong: float,
        vocab_size: int,
        tokens_max: int,
    ) -> None:
        self._spec = spec
        self._oracle = oracle
        self._rng = rng
        self._wrong = wrong
        self._tokens_max = tokens_max
        self._tokens: Collection[int] = range(vocab_size)
        self._at = 0
        self._proposal = NOTHING
        self.result = Speculated()

    def propose(self, token_ids: Sequence[int]) -> Proposal:
        if len(token_ids) != self._at:
            self._at = len(token_ids)
            expected = self._oracle(self._spec, token_ids)[
                : self._rng.randrange(self._tokens_max + 1)
            ]
            stops = self._spec.sampling.stop_token_ids or ()
            others = [token for token in self._tokens if token not in stops]
            drafts = [
                self._rng.choice(others) if self._rng.random() < self._wrong else token
                for token in expected
            ]
            self._proposal = Proposal(drafts, [0.9] * len(drafts))
        return self._proposal


class AlwaysSpeculator(Speculator):
    """Verifies all proposals, whatever they cost."""

    stats: SpeculationStats

    def __init__(
        self,
        oracle: Oracle,
        vocab_size: int,
        *,
        wrong: float = 0.3,
        seed: int = 0,
        tokens_max: int = 7,
    ) -> None:
        self._more = (oracle, random.Random(seed), wrong, vocab_size, tokens_max)
        self.stats = SpeculationStats()
        self._price = None
        self._recent = None

    def drafter(self, spec: SequenceSpec) -> Any:
        if spec.kv_budget is not None or spec.mode is Mode.PREFILL_ONLY:
            return None
        return ScriptedDrafter(spec, *self._more)

    def num_worthwhile(self, gains: Sequence[float], work: StepWork) -> int:
        return len(gains)


def speculate(engine: Engine, speculator: Speculator) -> None:
    """Lets the next sequences of an engine speculate."""
    engine._speculator = speculator
    engine._scheduler._speculator = speculator
    engine._new_sequences._speculator = speculator


def draft_model_of(engine: Engine) -> DraftModel:
    assert engine._draft_model is not None
    return engine._draft_model


def always_draft(engine: Engine, num_tokens: int = 4) -> None:
    """Lets an engine verify proposals of its draft model for all sequences, whatever they cost."""

    def plan(
        candidates: Sequence[Candidate], work: StepWork, sequences_max: int, tokens_max: int
    ) -> DraftPlan:
        missing = {at: each.num_missing for at, each in enumerate(candidates) if each.tokens_max}
        ready = [at for at in missing if missing[at] <= READY_TOKENS]
        behind = next((at for at in missing if missing[at] > READY_TOKENS), None)
        return DraftPlan(ready[:sequences_max], num_tokens, behind, chunk_tokens=16)

    def num_worthwhile(gains: Sequence[float], work: StepWork) -> int:
        return len(gains)

    draft_model_of(engine).plan = plan  # type: ignore[method-assign]
    engine._speculator.num_worthwhile = num_worthwhile  # type: ignore[method-assign]
