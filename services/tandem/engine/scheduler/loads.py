"""Decides which blocks of a sequence are loaded from tiers, and which of them the engine computes
during the load.

perf_model/soonest.py predicts which way to get the blocks is the fastest: to load, pull or compute
them. It uses the measured rates, the queues of the tiers and of this engine, and the blocks that
peers offer. A load starts from the last block. Meanwhile the sequence may compute its first missing
blocks. In each step it gets the part of the token budget that other sequences leave, rounded down
to whole blocks. How far it computes is decided anew in each step, by the progress of the load.

With sliding windows or states, a load brings the blocks that a sequence needs to resume at one
depth. At any other depth it would need other blocks of the windows, or another state. So the
sequence computes nothing during the load and pulls nothing from a peer afterwards: this engine
computes all tokens after that depth. A load of a state fills the sequence's running state, unless
the state is in the pool and is copied from there.
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
from tandem.engine.sequence import Loading, Sequence, SequenceStart
from tandem.engine.tiers.jobs import Load
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode

# The engine gives up a load and computes the load's blocks if all of these are true:
# - the current tier has read for more than _PATIENCE_S seconds, and its other reads are expected to
#   take more than _PATIENCE_S seconds;
# - one read takes more than _LATE times as long as expected;
# - computing is expected to be faster.
# Without the second condition, the engine would also give up loads that are as slow as expected.
# Such a load may have been chosen although computing is faster, because computing would delay other
# sequences.
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
        self, sequence: Sequence, start: SequenceStart, *, queued_tokens: int, num_delayed: int
    ) -> Loading:
        """Decides which blocks are loaded for a sequence that is about to be admitted.

        `queued_tokens` tokens of other prompts are computed before this prompt. `num_delayed` other
        sequences are delayed while this sequence computes.
        """
        if (rate := self._step_time.prefill_rate) is not None:
            self._tiers.take_rate(rate)
        if self._kv.has_windows:
            sequence.num_known_blocks = self._tiers.known_depth(sequence.reusable_hashes)
        if not sequence.may_load or start.is_fork:
            return Loading()
        loading = self._choose(sequence, start, queued_tokens, num_delayed)
        if not self._kv.has_windows or not loading.end:
            return loading
        awaits_more = sequence.mode is not Mode.WAITING_FOR_REMOTE_KV and (
            sequence.spec.offer is None and sequence.num_prefix_blocks > loading.end
        )
        if awaits_more or self.start_after_load(sequence, start, loading.end) is None:
            return Loading()
        loading.awaits = False
        return loading

    def start_after_load(
        self, sequence: Sequence, start: SequenceStart, end: int
    ) -> SequenceStart | None:
        """Returns the start of a sequence that resumes after `end` loaded blocks. `start` is its
        start without the load.

        With sliding windows or states, returns None if the pools have no room for it. The start
        without the load resumes at a smaller depth, where it needs other blocks.
        """
        plain = replace(
            start,
            num_computed_tokens=start.num_cached_blocks * sequence.block_size,
            resume=end * sequence.block_size,
            sources=(),
            checkpoint=start.checkpoint if sequence.mode is Mode.PREFILL_ONLY else 0,
            taken=(),
        )
        if not self._kv.has_windows:
            return plain
        states = self._kv.find_states(sequence.block_hashes[end - 1])
        starts = [plain]
        if any(state is not None for state in states):
            starts = [replace(plain, sources=states)]
        if self._kv.has_states and states.count(None) == len(states) - len(
            self._kv.layout.state_groups
        ):
            starts.append(starts[0].taking_states())
        return next((each for each in starts if self._fits(sequence, each, end)), None)

    def _fits(self, sequence: Sequence, start: SequenceStart, end: int) -> bool:
        return self._kv.can_reserve(sequence.demand(start, loaded=end))

    def _choose(
        self, sequence: Sequence, start: SequenceStart, queued_tokens: int, num_delayed: int
    ) -> Loading:
        held = start.num_cached_blocks
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
        """Returns whether a sequence should wait until the object store was searched for its
        blocks."""
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

    def start(self, sequence: Sequence, start: SequenceStart) -> None:
        """Starts the load of a sequence whose blocks are reserved for `start`."""
        end = sequence.loading.end
        self.use(sequence)
        copied = {group for group, source in enumerate(start.sources) if source is not None}
        if start.taken:
            copied.update(sequence.tables.states)
        self._tiers.load(
            sequence.sequence_id,
            sequence.block_hashes[:end],
            self._kv.unfilled(sequence.tables, end, copied),
            num_spared=sequence.loading.num_spared,
        )
        load = self._tiers.find_load(sequence.sequence_id)
        reach = self._tiers.reach_of(load)
        load.expected_s = {tier: r.block_s for tier, r in zip(load.ends, reach, strict=True)}

    def use(self, sequence: Sequence) -> None:
        """Reports to the tiers which blocks a sequence has stored or reused since the last call for
        this sequence."""
        if used := sequence.take_used():
            asked = sequence.spec.retention
            self._tiers.use(used, keep=asked.returns, priority=asked.priority)

    def take(self, load: Load, sequence: Sequence) -> bool:
        """Records which blocks of the sequence an ended load has filled. Returns False if they are
        useless: with sliding windows, an incomplete load is of no use."""
        if not self._kv.has_windows:
            sequence.take_loaded(load.blocks, load.first_block, load.num_read_by_tier)
            return True
        end = sequence.loading.end
        by_tier = load.num_read_by_tier
        if load.is_whole:
            num_held = end - sum(by_tier.values())
            # If all groups have a window, no token needs the blocks before the windows. They count
            # as loaded, so that the counts add up to `end` blocks.
            if self._kv.layout.groups[0].window is not None:
                by_tier[next(iter(by_tier))] += num_held
                num_held = 0
            sequence.take_loaded(range(sequence.num_stored_blocks, end), num_held, by_tier)
        return load.is_whole

    def find_chunk(self, sequence: Sequence, tokens_left: int) -> int:
        """Returns how many tokens a LOADING sequence should compute in a step that has room for
        `tokens_left` tokens."""
        rate = self._step_time.prefill_rate
        if not sequence.loading.computes or rate is None:
            return 0
        rate = rate.stretched(UNSURE)
        size = sequence.block_size
        load = self._tiers.find_load(sequence.sequence_id)
        at = sequence.num_computed_tokens // size
        end = min(load.first_block + load.num_free, at + tokens_left // size)
        if sequence.spec.images:  # embeddings of images are not computed during a load
            image = sequence.first_image_token(sequence.num_computed_tokens, sequence.num_tokens)
            end = min(end, image // size)
        if at >= end:
            return 0
        reach = self._tiers.reach_of(load)

        def compute_s(block: int) -> float:
            return rate.seconds((block - at) * size, at * size, self._max_tokens_per_step)

        def load_s(block: int) -> float:
            return load_seconds(reach, block, load.blocks.start)

        return (min(end, meeting_block(compute_s, load_s, at, load.blocks.start)) - at) * size

    def find_slow(self, loading: Iterable[Sequence]) -> list[str]:
        """Returns the ids of LOADING sequences whose loads should be given up: they have stalled,
        or it is expected to be faster to compute all their blocks."""
        stalled = self._tiers.find_stalled()
        return [
            each.sequence_id
            for each in loading
            if each.sequence_id in stalled or self._is_slow(each)
        ]

    def _is_slow(self, sequence: Sequence) -> bool:
        load = self._tiers.find_load(sequence.sequence_id)
        rate = self._step_time.prefill_rate
        read_s, part_s, num_left = load.pace
        left_s = part_s * num_left
        is_late = part_s > _LATE * load.expected_s[load.tier]
        if rate is None or not is_late or min(read_s, left_s) <= _PATIENCE_S:
            # Too early to give up. A tier's first block may take much longer than the next ones.
            return False
        start = sequence.num_stored_blocks
        size = sequence.block_size
        num_tokens = (sequence.loading.end - start) * size
        return left_s > UNSURE * rate.seconds(num_tokens, start * size, self._max_tokens_per_step)

    def has_work(self, loading: Iterable[Sequence]) -> bool:
        """Returns whether the next step would compute blocks of a LOADING sequence or give up its
        load."""
        loading = list(loading)
        computes = any(self.find_chunk(each, self._max_tokens_per_step) for each in loading)
        return computes or bool(self.find_slow(loading))

    def take_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Removes blocks from the load of a LOADING sequence, so that the engine can compute the
        sequence's next `num_tokens` tokens instead.

        Returns the number of tokens to compute. It is smaller than `num_tokens` if the load has
        begun to read some of these blocks.
        """
        size = sequence.block_size
        load = self._tiers.find_load(sequence.sequence_id)
        start = sequence.num_computed_tokens
        num_parts = (start + num_tokens) // size - load.first_block
        num_taken = min(num_parts, load.take(num_parts))
        return max(0, (load.first_block + num_taken) * size - start)


def _may_compute(sequence: Sequence, num_blocks: int) -> bool:
    """Returns whether a sequence may compute blocks while its first `num_blocks` blocks are loaded.

    Returns False if the sequence must wait for a peer's KV after the load, because this wait may be
    long.
    """
    if sequence.mode is Mode.WAITING_FOR_REMOTE_KV and sequence.spec.producer is None:
        missing = sequence.num_tokens - num_blocks * sequence.block_size
        return missing < sequence.spec.remote_prefill_min_tokens
    return not sequence.num_prefix_blocks or sequence.spec.offer is not None
