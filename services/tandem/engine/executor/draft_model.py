"""Runs the draft model of an engine: a smaller model that proposes the next tokens of sequences.

It has a KV pool of its own, whose blocks are never cached, hashed, announced or sent. Its KV
depends on token ids only, so a sequence keeps its blocks here when it is preempted:

    tokens of a sequence   t0 ... t7 | t8 t9 | p1 p2 p3      p1 to p3: proposed
    KV of the draft model  t0 ... t7 |                       num_computed = 8
    its steps                          t8 t9 -> p1, p1 -> p2, p2 -> p3

Afterwards it has the KV of t0 to t9, p1 and p2. That of accepted tokens counts. That of rejected
ones is overwritten. A state cannot drop a token, so a draft model with states computes p1 and p2 on
a copy of the state after t9, in a scratch slot, and computes accepted tokens again.

The draft model computes between the steps of the engine, and only beside steps without a prompt
(draft_plan.py). It ignores LoRA adapters and images, so their requests get worse proposals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tandem.common.config.engine import EngineConfig
from tandem.common.perf_model.meters import LinearMeter
from tandem.common.perf_model.step_time import StepWork
from tandem.engine.cache.block_copy import BlockCopy
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.kv_cache import BlockDemand, KvCache
from tandem.engine.cache.layout.kv_groups import divide_pool
from tandem.engine.executor.sampler import guessed_draw
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.engine.speculation.draft_plan import Candidate, DraftPlan, DraftRates, plan_drafts
from tandem.engine.speculation.model_drafter import ModelDrafter
from tandem.engine.speculation.speculator import Speculator
from tandem_kernels.sampling import NO_TOKEN, Draw

_CHUNK_MAX = 256  # largest number of tokens of a prompt in one step of the draft model
# Assumed times before enough were measured, as parts of a step of the model: a step of the draft
# model and each token of it, and each token of a chunk.
_ASSUMED_STEP = (0.2, 0.005)
_ASSUMED_CHUNK = (0.02,)
_MEASURED_AFTER = 8  # number of measurements that are enough
# Assumed number of tokens of an answer, and the weight of each answer in the mean.
_ANSWER_TOKENS = 128.0
_ANSWER_WEIGHT = 0.1
# Trials take this part of the time of decode steps. They may save up so many seconds.
_TRIAL_SHARE = 0.01
_TRIAL_S_MAX = 2.0


@dataclass(slots=True)
class _Held:
    """The KV of one sequence in the draft model's pool."""

    tables: BlockTables
    num_computed: int = 0  # number of leading tokens of the sequence with KV
    # The proposed tokens with KV after these, which count if the sequence got them.
    guess: list[int] = field(default_factory=list)
    # While tokens are proposed, if the draft model has states: the copies of the states after the
    # known tokens to scratch slots.
    scratch: list[BlockCopy] = field(default_factory=list)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Counts the KV of the proposed tokens that the sequence got."""
        for token_id, guess in zip(token_ids[self.num_computed :], self.guess, strict=False):
            if token_id != guess:
                break
            self.num_computed += 1
        self.guess = []
        # The last token is always computed, because its logits are needed.
        self.num_computed = min(self.num_computed, len(token_ids) - 1)


class Meter:
    """Fits the duration of one kind of computation of the draft model. Leaves out the first one,
    which takes longer, because memory is used for the first time."""

    def __init__(self, assumed: Sequence[float]) -> None:
        """`assumed` are the assumed coefficients, as parts of the time of a step of the model."""
        self._assumed = assumed
        self._fit = LinearMeter(assumed)
        self._is_warm = False

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Adds a measurement."""
        if self._is_warm:
            self._fit.observe(features, seconds)
        self._is_warm = True

    def coefficients(self, step_s: float) -> tuple[float, ...]:
        """Returns the fitted coefficients. `step_s` is the time of a step of the model. At first,
        they are at most the assumed ones: a few slow computations on a busy machine must not end
        the use of the draft model."""
        assumed = tuple(part * step_s for part in self._assumed)
        fitted = self._fit.coefficients
        if self._fit.num_observations >= _MEASURED_AFTER:
            return fitted
        return tuple(map(min, fitted, assumed)) if self._fit.num_observations else assumed


class DraftModel:
    """The draft model of one engine, and the KV that it has of each sequence."""

    def __init__(
        self, runner: Runner, config: EngineConfig, speculator: Speculator, num_blocks: int
    ) -> None:
        """Allocates a KV pool for as many tokens as `num_blocks` blocks have. `config` are the
        settings of the engine. Raises ConfigError."""
        settings = replace(config, num_blocks=num_blocks, speculative_config="off")
        sizes = divide_pool(runner.layout, settings, step_tokens=_CHUNK_MAX).sizes
        runner.allocate(*sizes)
        self.clock = time.perf_counter
        self._runner = runner
        layout = runner.layout(*sizes)
        num_scratch = config.max_num_seqs if layout.state_groups else 0
        self._kv = KvCache(layout, num_scratch=num_scratch)
        self._speculator = speculator
        self._held: dict[EngineSequence, _Held] = {}
        self._steps = Meter(_ASSUMED_STEP)  # by a constant and the number of tokens of a step
        self._chunks = Meter(_ASSUMED_CHUNK)  # by the number of tokens of a chunk
        self._trial_s = 0.0  # seconds that trials may take
        self._answer_tokens = _ANSWER_TOKENS
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Returns the seconds that the draft model has computed since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def release(self, sequence: EngineSequence) -> None:
        """Frees the blocks of a sequence that has ended or left the engine."""
        num_output = sequence.num_tokens - sequence.spec.num_prompt_tokens
        if isinstance(sequence.drafter, ModelDrafter) and num_output > 1:
            self._answer_tokens += _ANSWER_WEIGHT * (num_output - self._answer_tokens)
        if (held := self._held.pop(sequence, None)) is not None:
            self._kv.release(held.tables)

    def check_integrity(self) -> None:
        """Raises AssertionError with a description if blocks are inconsistent."""
        self._kv.check_integrity([held.tables for held in self._held.values()])

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that sequences hold."""
        return sum(pool.num_used for pool in self._kv.pools)

    def prepare(
        self,
        sequences: Iterable[EngineSequence],
        work: StepWork,
        *,
        sequences_max: int,
        tokens_max: int,
    ) -> None:
        """Computes proposals as `DraftProposals.prepare` says."""
        able: list[EngineSequence] = []
        candidates: list[Candidate] = []
        for sequence in sequences:
            drafter = sequence.drafter
            # A sequence of which proposed tokens are left proposes these.
            if isinstance(drafter, ModelDrafter) and not drafter.awaits_tokens(sequence.token_ids):
                able.append(sequence)
                candidates.append(self._candidate(sequence, drafter))
        plan = self.plan(candidates, work, sequences_max, tokens_max)
        before_s = self._seconds
        if plan.caught_up is not None:
            self._catch_up(able[plan.caught_up], plan.chunk_tokens)
        if plan.drafted:
            depths = {able[at]: min(plan.depth, candidates[at].tokens_max) for at in plan.drafted}
            self._draft(depths)
        if plan.is_trial:
            self._trial_s -= self._seconds - before_s

    def _candidate(self, sequence: EngineSequence, drafter: ModelDrafter) -> Candidate:
        num_tokens = sequence.num_tokens
        num_left = drafter.num_left(sequence.token_ids)
        held = self._held.get(sequence)
        if held is not None and not self._kv.has_states:
            held.settle(sequence.token_ids)
        tokens_max = min(
            self._speculator.tokens_max,
            sequence.num_drafts_max,
            num_left - 1,  # one more token is sampled after the last proposed one
            self._runner.max_model_len - num_tokens,
        )
        num_missing = num_tokens - (0 if held is None else held.num_computed)
        if not num_missing:  # the state has the last token, so its logits cannot be computed again
            tokens_max = 0
        expected = min(num_left, self._answer_tokens)
        return Candidate(drafter.probability, num_missing, expected, max(0, tokens_max))

    def plan(
        self,
        candidates: Sequence[Candidate],
        work: StepWork,
        sequences_max: int,
        tokens_max: int,
    ) -> DraftPlan:
        """Returns what to compute in a step with `work`."""
        price = self._speculator.price(work)
        if price is None or not price.step_s:
            return DraftPlan()
        self._trial_s = min(_TRIAL_S_MAX, self._trial_s + _TRIAL_SHARE * price.step_s)
        plan = plan_drafts(
            candidates,
            num_sequences=work.decode_tokens,
            price=price,
            rates=self.rates(price.step_s),
            sequences_max=sequences_max,
            tokens_max=tokens_max,
            chunk_max=_CHUNK_MAX,
            trial_s=self._trial_s,
        )
        if candidates and not plan.drafted:
            self._speculator.skip(work)
        return plan

    def rates(self, target_step_s: float) -> DraftRates:
        """Returns the measured times of the draft model. Those that were not measured yet are
        derived from the time of a step of the model."""
        step_s, token_s = self._steps.coefficients(target_step_s)
        (chunk_token_s,) = self._chunks.coefficients(target_step_s)
        return DraftRates(step_s, token_s, chunk_token_s)

    def _catch_up(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Computes at most `num_tokens` missing tokens of a sequence, but not its last one."""
        held = self._hold(sequence)
        if held is None:
            return
        first = held.num_computed
        end = self._kv.extend(held.tables, min(first + num_tokens, sequence.num_tokens - 1))
        if end <= first:
            return
        started = self.clock()
        chunk = self._slice(sequence.token_ids[first:end], held, end)._replace(wants_logits=False)
        self._runner.forward(StepBatch([chunk]), None)
        self._runner.synchronize()
        seconds = self.clock() - started
        held.num_computed = end
        self._kv.free_out_of_window(held.tables, end)
        self._chunks.observe((end - first,), seconds)
        self._charge([sequence], seconds)

    def _draft(self, depths: dict[EngineSequence, int]) -> None:
        """Computes the missing tokens of these sequences, and samples so many proposed tokens for
        each."""
        rows: list[tuple[EngineSequence, _Held, int]] = []
        for sequence, depth in depths.items():
            if (held := self._hold(sequence)) is None:
                continue
            num_tokens = sequence.num_tokens
            # The KV of the last proposed token is not computed.
            covered = self._kv.extend(held.tables, num_tokens + depth - 1)
            if covered >= num_tokens:
                rows.append((sequence, held, min(depth, covered - num_tokens + 1)))
        guesses: dict[EngineSequence, list[int]] = {sequence: [] for sequence, *_ in rows}
        draws = {sequence: guessed_draw(sequence) for sequence in guesses}
        started = self.clock()
        computed = list(rows)
        while computed:
            self._step(computed, guesses, draws)
            computed = [
                row
                for row in computed
                if len(guesses[row[0]]) < row[2] and guesses[row[0]][-1] != NO_TOKEN
            ]
            if self._kv.has_states:
                self._start_scratch([held for _, held, _ in computed if not held.scratch])
        for sequence, held, _ in rows:
            self._kv.return_scratch(held.scratch)
            held.scratch = []
            guess = guesses[sequence]
            if guess[-1] == NO_TOKEN:  # the draft model's logits were NaN or infinite
                del guess[-1]
            held.num_computed = sequence.num_tokens
            held.guess = [] if self._kv.has_states else guess[:-1]
            assert isinstance(sequence.drafter, ModelDrafter)
            sequence.drafter.put(sequence.token_ids, guess)
            # If the sequence gets no token, its last one is computed again.
            self._kv.free_out_of_window(held.tables, held.num_computed - 1)
        self._charge(list(guesses), self.clock() - started)

    def _start_scratch(self, rows: Iterable[_Held]) -> None:
        """Copies states to scratch slots, on which the next steps compute."""
        for held in rows:
            held.scratch = self._kv.take_scratch(held.tables)
            self._runner.copy_blocks(held.scratch)

    def _step(
        self,
        rows: Sequence[tuple[EngineSequence, _Held, int]],
        guesses: dict[EngineSequence, list[int]],
        draws: dict[EngineSequence, Draw],
    ) -> None:
        """Samples one more proposed token of each sequence."""
        started = self.clock()
        slices = []
        wanted = []
        for sequence, held, _ in rows:
            guess = guesses[sequence]
            new = guess[-1:] or sequence.token_ids[held.num_computed :]
            slices.append(self._slice(new, held, sequence.num_tokens + len(guess)))
            position = sequence.num_tokens + len(guess)
            wanted.append(replace(draws[sequence], position=position))
        logits = self._runner.forward(StepBatch(slices), None)
        for (sequence, *_), token_id in zip(
            rows, self._runner.start_sampling(logits, wanted).wait(), strict=True
        ):
            guesses[sequence].append(token_id)
        seconds = self.clock() - started
        num_tokens = sum(each.num_tokens for each in slices)
        self._steps.observe((1.0, num_tokens), seconds)

    def _slice(self, token_ids: list[int], held: _Held, context_len: int) -> SequenceSlice:
        first, *others = held.tables.ids
        for copy in held.scratch:
            others[copy.group - 1] = [copy.target]
        return SequenceSlice(token_ids, context_len, first, True, other_tables=others)

    def _hold(self, sequence: EngineSequence) -> _Held | None:
        """Returns the KV of a sequence. Returns None if the pool has no room for its tokens. So no
        prompt is computed in vain."""
        if (held := self._held.get(sequence)) is None:
            tables = self._kv.reserve(BlockDemand(num_tokens=sequence.num_tokens, resume=0))
            if tables is None:
                return None
            held = self._held[sequence] = _Held(tables)
        return held

    def _charge(self, sequences: Sequence[EngineSequence], seconds: float) -> None:
        """Counts the seconds of a computation for these sequences."""
        self._seconds += seconds
        for sequence in sequences:
            if sequence.drafter is not None:
                self._speculator.charge(sequence.drafter, seconds / len(sequences))
