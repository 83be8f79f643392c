"""Decides which blocks of a sequence tiers below the pool load, and which it computes meanwhile.

perf_model/soonest.py decides, from the measured rates of the tiers and of this engine, their
queues, and the blocks that peers offer. A sequence that computes meanwhile takes the tokens that
others leave of a step, in whole blocks. Each step decides anew how far it computes, from the
progress of the load.

With windows, a load brings the blocks that a sequence needs to continue at one depth, and the rest
is computed here: blocks of windows at another depth are of no use before the load, or for a peer's
KV after it.
"""

from collections.abc import Iterable
from dataclasses import replace

from tandem.common.perf_model.soonest import (
    UNSURE,
    Prompt,
    choose_soonest,
    load_seconds,
    meeting_block,
)
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.sequence import Admission, Loading, Sequence
from tandem.engine.tiers.jobs import Load
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode

# A load is given up for computing if a tier has read it for so many seconds, as many are left, and
# it takes so many times as long as was expected. Without the last condition it would be given up
# where it was chosen because computing delays other sequences.
_PATIENCE_S = 2.0
_LATE = 4.0


class Loads:
    def __init__(
        self, tiers: Tiers, kv: KvCache, step_time: StepTimeModel, max_tokens_per_step: int
    ) -> None:
        self._tiers = tiers
        self._kv = kv
        self._step_time = step_time
        self._max_tokens_per_step = max_tokens_per_step

    def plan(
        self, sequence: Sequence, admission: Admission, *, queued_tokens: int, num_delayed: int
    ) -> Loading:
        """Returns the load of a sequence that is about to be admitted.

        `queued_tokens` prompt tokens are computed before its own. `num_delayed` sequences are
        delayed while it computes.
        """
        if (rate := self._step_time.prefill_rate) is not None:
            self._tiers.take_rate(rate)
        if self._kv.has_windows:
            sequence.num_known_blocks = self._tiers.known_depth(sequence.reusable_hashes)
        if not sequence.may_load or admission.is_fork:
            return Loading()
        loading = self._choose(sequence, admission, queued_tokens, num_delayed)
        if not self._kv.has_windows or not loading.end:
            return loading
        awaits_more = sequence.mode is not Mode.WAITING_FOR_REMOTE_KV and (
            sequence.spec.offer is None and sequence.num_prefix_blocks > loading.end
        )
        if awaits_more or not self._fits(sequence, admission, loading):
            return Loading()
        loading.awaits = False
        return loading

    def admission(self, sequence: Sequence, num_cached_blocks: int) -> Admission:
        """Returns the admission of a sequence that loads: it resumes after the loaded blocks."""
        admission = sequence.plan(num_cached_blocks)
        return replace(admission, resume=sequence.loading.end * sequence.block_size)

    def _fits(self, sequence: Sequence, admission: Admission, loading: Loading) -> bool:
        """Returns whether there is room for the blocks of a load. A load resumes at another depth
        than the admission, so it references other blocks of windows."""
        return self._kv.can_reserve(
            sequence.reusable_hashes,
            admission.num_cached_blocks,
            num_tokens=sequence.num_tokens,
            resume=loading.end * sequence.block_size,
            loaded=loading.end,
        )

    def _choose(
        self, sequence: Sequence, admission: Admission, queued_tokens: int, num_delayed: int
    ) -> Loading:
        held = admission.num_cached_blocks
        tiers = self._tiers.reach(sequence.reusable_hashes, held)
        deepest = max((tier.num_blocks for tier in tiers), default=0)
        rate = self._step_time.prefill_rate
        if deepest <= held or rate is None:
            return Loading(deepest) if deepest > held else Loading()
        prompt = Prompt(
            sequence.num_tokens,
            sequence.block_size,
            held,
            rate,
            self._max_tokens_per_step,
            rate.seconds(queued_tokens, 0, self._max_tokens_per_step),
            num_delayed,
        )
        is_remote = sequence.mode is Mode.WAITING_FOR_REMOTE_KV
        offer = sequence.spec.offer if sequence.may_wait_for_remote_kv else None
        choice = choose_soonest(
            prompt,
            tiers,
            load_queue_s=self._tiers.queued_s,
            offer=offer,
            producer=sequence.spec.producer if is_remote else None,
            meets=not self._kv.has_windows and _may_compute(sequence, deepest),
            pulls_rest=not self._kv.has_windows,
        )
        if not choice.loads:
            self._tiers.decline()
            return Loading()
        computes = choice.first > held
        may_await = is_remote or choice.pulls or offer is None
        return Loading(choice.end, computes, choice.first - held, may_await and not computes)

    def awaits_lookup(self, sequence: Sequence, kv: KvCache) -> bool:
        """Returns whether the sequence waits for a store to say how many of its blocks it has."""
        if not sequence.may_load or not self._tiers.lookups.are_on:
            return False
        hashes = sequence.reusable_hashes
        size = sequence.block_size
        cached = kv.match(hashes)
        rate = self._step_time.prefill_rate
        num_missing = (len(hashes) - cached) * size
        compute_s = None
        if rate is not None:
            compute_s = rate.seconds(num_missing, cached * size, self._max_tokens_per_step)
        return self._tiers.lookups.awaits_answer(sequence.sequence_id, hashes, cached, compute_s)

    def start(self, sequence: Sequence) -> None:
        """Starts the load of a sequence that has its blocks."""
        end = sequence.loading.end
        self.use(sequence)
        self._tiers.load(
            sequence.sequence_id,
            sequence.block_hashes[:end],
            self._kv.unfilled(sequence.tables, end),
            num_spared=sequence.loading.num_spared,
        )
        load = self._tiers.find_load(sequence.sequence_id)
        reach = self._tiers.reach_of(load)
        load.expected_s = {tier: r.block_s for tier, r in zip(load.ends, reach, strict=True)}

    def use(self, sequence: Sequence) -> None:
        """Tells the tiers which blocks a sequence has stored or reused since the last call."""
        if used := sequence.take_used():
            asked = sequence.spec.retention
            self._tiers.use(used, keep=asked.returns, priority=asked.priority)

    def take(self, load: Load, sequence: Sequence) -> bool:
        """Takes the blocks of a load that ended. Returns False if they are of no use, because a
        block that windows need failed."""
        if not self._kv.has_windows:
            sequence.take_loaded(load.blocks, load.first_block, load.num_read_by_tier)
            return True
        end = sequence.loading.end
        by_tier = load.num_read_by_tier
        if load.is_whole:
            num_held = end - sum(by_tier.values())
            if self._kv.layout.groups[0].window is not None:  # no sequence needs the others
                by_tier[next(iter(by_tier))] += num_held
                num_held = 0
            sequence.take_loaded(range(sequence.num_stored_blocks, end), num_held, by_tier)
        return load.is_whole

    def find_chunk(self, sequence: Sequence, tokens_left: int) -> int:
        """Returns how many of the step's `tokens_left` a LOADING sequence should compute."""
        rate = self._step_time.prefill_rate
        if not sequence.loading.computes or rate is None:
            return 0
        rate = rate.stretched(UNSURE)
        size = sequence.block_size
        load = self._tiers.find_load(sequence.sequence_id)
        at = sequence.num_computed_tokens // size
        end = min(load.first_block + load.num_free, at + tokens_left // size)
        if at >= end:
            return 0
        reach = self._tiers.reach_of(load)

        def compute_s(block: int) -> float:
            return rate.seconds((block - at) * size, at * size, self._max_tokens_per_step)

        def load_s(block: int) -> float:
            return load_seconds(reach, block, load.blocks.start)

        return (min(end, meeting_block(compute_s, load_s, at, load.blocks.start)) - at) * size

    def find_slow(self, loading: Iterable[Sequence]) -> list[str]:
        """Returns the LOADING sequences whose loads stand still, or have become so slow that to
        compute all of their blocks is sooner."""
        slow = self._tiers.find_stalled()
        return slow + [
            each.sequence_id
            for each in loading
            if each.sequence_id not in slow and self._is_slow(each)
        ]

    def _is_slow(self, sequence: Sequence) -> bool:
        load = self._tiers.find_load(sequence.sequence_id)
        rate = self._step_time.prefill_rate
        read_s, part_s, num_left = load.pace
        left_s = part_s * num_left
        is_late = part_s > _LATE * load.expected_s[load.tier]
        if rate is None or not is_late or min(read_s, left_s) <= _PATIENCE_S:
            return False  # a tier's first part may take long, and says little of the others
        start = sequence.num_stored_blocks
        size = sequence.block_size
        num_tokens = (sequence.loading.end - start) * size
        return left_s > UNSURE * rate.seconds(num_tokens, start * size, self._max_tokens_per_step)

    def has_work(self, loading: Iterable[Sequence]) -> bool:
        """Returns whether a LOADING sequence computes, or ends its load."""
        loading = list(loading)
        computes = any(self.find_chunk(each, self._max_tokens_per_step) for each in loading)
        return computes or bool(self.find_slow(loading))

    def take_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Takes the next blocks of a LOADING sequence from its load, to compute them instead.
        Returns the tokens of those that are not being read yet."""
        size = sequence.block_size
        load = self._tiers.find_load(sequence.sequence_id)
        start = sequence.num_computed_tokens
        num_parts = (start + num_tokens) // size - load.first_block
        num_taken = min(num_parts, load.take(num_parts))
        return max(0, (load.first_block + num_taken) * size - start)


def is_awaited(index: int, block_hashes: list[bytes], loading: Iterable[Sequence]) -> bool:
    """Returns whether a LOADING sequence loads the block at `index` of this chain."""
    return any(
        s.num_stored_blocks <= index < s.loading.end
        and s.block_hashes[index] == block_hashes[index]
        for s in loading
    )


def _may_compute(sequence: Sequence, num_blocks: int) -> bool:
    """Returns whether a sequence may compute its first blocks while those up to `num_blocks` are
    loaded. It may not if it would then wait for a peer's KV for an unknown time."""
    if sequence.mode is Mode.WAITING_FOR_REMOTE_KV and sequence.spec.producer is None:
        missing = sequence.num_tokens - num_blocks * sequence.block_size
        return missing < sequence.spec.remote_prefill_min_tokens
    return not sequence.num_prefix_blocks or sequence.spec.offer is not None
