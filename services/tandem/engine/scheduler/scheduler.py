"""Plans each step: the chunks to compute, the sequences that get blocks, and those that are
preempted.

The scheduler knows sequences and block pools, but no tensors. The token budget of a step goes to
decode first and then to prefill in order of arrival. Prefill chunks are sized to keep the step
within its time limit (perf_model/step_time.py). Then waiting sequences are admitted, oldest first.

Loads: if a tier has more blocks of a sequence than the pool, the sequence is LOADING first, while
other sequences run. It holds all its blocks, like a sequence that awaits KV from a peer. If a step
has tokens left, the sequence may compute its first blocks during the load (loads.py).

Blocks: a sequence is admitted only if every block that its tokens need can be reserved. Until then
it holds no block. In a KV group with a window, an admission reserves only the blocks that a decode
step needs. The further blocks that a chunk of the prompt needs are allocated when the chunk is
planned, and released when the chunk is computed. A decoding sequence allocates one more block when
its last block is full.

Preemption: if the pool has no block, the youngest running sequence is preempted. It releases its
blocks, waits again in its place by age, and is computed again. A sequence is never preempted while
it is LOADING or WAITING_FOR_KV, because a load or a pull writes to its blocks. A PREFILL_ONLY
sequence is never preempted, because a consumer relies on its blocks. A sequence that awaited only
its prefix (`prefix_blocks`) can be preempted once it runs. After a preemption it does not wait for
its prefix again.

Two sequences cannot preempt each other for ever. No sequence takes blocks from an older one: if
there is no younger sequence, it preempts itself. Waiting sequences are admitted oldest first. An
admitted sequence produces at least one token before it can need another block. So the oldest
sequence advances with each of its admissions. It can only wait for blocks that are leased to peers
or awaited from them, and leases have deadlines.

Lines of batches come after all other sequences, whenever they arrived: they are admitted last, and
preempted first, also to make room for a waiting sequence. They pause while other sequences are
computed, but for one step of several, so that they are not starved.

Launched ahead: on a GPU, the engine launches a decode step before the tokens of the step before are
known, so that the GPU does not wait for the host. Such a step has no chunk of a prompt and needs no
preemption. Its only uncertainty is which sequences end: the step computes one token too many for
each sequence that ends with a stop token, and the engine drops these tokens.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from tandem.common.perf_model.predict import beside_decode
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.perf_model.running_slots import num_running_slots
from tandem.common.perf_model.step_time import StepTimeModel, StepWork
from tandem.engine.adapter_slots import AdapterSlots, AdapterSlotState
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.cache.layout.kv_groups import SLOTS_OF_SEQUENCE
from tandem.engine.image_rows import ImageRows
from tandem.engine.scheduler.chunking import Link, lag_after, next_chunk, tail_chunk
from tandem.engine.scheduler.deadlines import Deadlines
from tandem.engine.scheduler.early_reuse import EarlyReuse, find_parent
from tandem.engine.scheduler.loads import Loads
from tandem.engine.scheduler.schedule import Chunk, Schedule
from tandem.engine.sequence import Sequence, SequenceStart, Status
from tandem.engine.speculation.drafter import Proposal
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode
from tandem.errors import Overloaded

# Maximum number of prompt tokens in a step whose logits are needed, because a request wants their
# log probabilities. The logits of one token have 0.6 MB with a vocabulary of 150,000 tokens.
PROMPT_LOGITS_MAX = 128
DRAFTS_MAX = 128  # maximum number of proposed tokens in a step, because their logits are needed

# Number of tokens for which a load for a peer leaves blocks to each running sequence: about two
# seconds of decoding, after which the peer has pulled the loaded blocks.
_GROWTH_TOKENS = 256

# A step that computes prompts of lines of batches takes at most about this long, because a prompt
# that arrives meanwhile waits for it.
_LINES_STEP_S = 0.02
_LINES_TOKENS_MIN = 32  # smallest limit of such a step, as steps of fewer tokens are slow for each
# While other sequences are computed, a step computes prompts of lines and decodes all lines only
# after so many steps without them. So lines advance, and the 90th percentile of the others' times
# between tokens hardly changes.
LINES_STEPS_APART = 32


def _order(sequence: Sequence) -> tuple[bool, int]:
    return sequence.spec.is_batch, sequence.arrival


class DraftProposals(Protocol):
    """What computes the proposals of a draft model."""

    def prepare(
        self,
        sequences: Iterable[Sequence],
        work: StepWork,
        *,
        sequences_max: int,
        tokens_max: int,
    ) -> None:
        """Computes proposals for the decoding sequences of a step with `work`, which has no prompt,
        as far as this pays: for at most `sequences_max` of them, `tokens_max` tokens in all."""


class Scheduler:
    """The queues of an engine's sequences, and the plan of each step. `waiting` and `running` are
    sorted by arrival."""

    def __init__(
        self,
        kv: KvCache,
        step_time: StepTimeModel,
        *,
        max_num_seqs: int,
        max_tokens_per_step: int,
        itl_limit_s: float,
        shared_wait_s: float,
        adapters: AdapterSlots,
        tiers: Tiers,
        images: ImageRows,
        speculator: Speculator,
        draft_model: DraftProposals | None = None,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.awaiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.early_reuse = EarlyReuse(kv, tiers, shared_wait_s)
        self._kv = kv
        # A slot that a tier copies cannot be evicted.
        self._num_slots_left = SLOTS_OF_SEQUENCE + bool(tiers.tiers)
        self.loads = Loads(tiers, kv, step_time, max_tokens_per_step)
        self._step_time = step_time
        self._max_num_seqs = max_num_seqs
        self._max_tokens_per_step = max_tokens_per_step
        self._itl_limit_s = itl_limit_s
        self._adapters = adapters
        self._images = images
        self._speculator = speculator
        self._draft_model = draft_model
        self._unmeasured = kv.rates(max_tokens_per_step)
        self._num_steps_apart = 0  # number of steps since the last one with lines of batches
        self.deadlines = Deadlines(self._prefill_rates, self._has_rates, time.monotonic)

    def enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.num_matched_blocks = self._kv.match(sequence.reusable_hashes)
        insort(self.waiting, sequence, key=_order)

    def start(self, sequence: Sequence) -> None:
        """Makes a sequence RUNNING, so that it does not wait for a peer's KV any more. The sequence
        must have its blocks."""
        self.withdraw(sequence)
        sequence.stop_awaiting_kv()
        sequence.is_begun |= sequence.mode is not Mode.PREFILL_ONLY
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)

    def start_local(self, sequence: Sequence) -> None:
        """Lets this engine compute a sequence for which no KV arrived from the peer.

        With sliding windows or a KV budget the sequence is queued again. It holds only the blocks
        that the peer's KV would have filled, and computing the KV here needs other blocks.
        """
        if self._kv.is_windowed(sequence.tables):
            self.restart_local(sequence)
        else:
            self.start(sequence)

    def restart_local(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """Releases the blocks of a sequence that awaited KV, and queues it so that this engine
        computes all of it.

        No pulled block is kept: the blocks of a window that are needed to resume at one depth are
        of no use at another depth.
        """
        self.withdraw(sequence)
        self._kv.release(sequence.release_tables(), unsafe_blocks)
        sequence.stop_awaiting_kv()
        sequence.is_begun = True
        self.enqueue(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Makes a sequence WAITING_FOR_KV if it must wait for a peer's KV, and RUNNING otherwise.
        The sequence must have its blocks."""
        self.withdraw(sequence)
        if sequence.lacks_kv:
            sequence.status = Status.WAITING_FOR_KV
            self.awaiting.append(sequence)
        else:
            self.start(sequence)

    def compute_instead(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """Releases the blocks of a sequence whose load failed, and queues it to be computed."""
        self.withdraw(sequence)
        self._kv.release(sequence.release_tables(), unsafe_blocks)
        sequence.may_load = False
        self.enqueue(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Removes a sequence from its queue, if it is in one. The sequence keeps its blocks."""
        for queue in (self.waiting, self.running, self.awaiting, self.loading):
            if sequence in queue:
                queue.remove(sequence)

    def check_deadline(self, sequence: Sequence) -> None:
        """Raises Overloaded if the first token of a new sequence would be late on this engine."""
        sequence.num_matched_blocks = self._kv.match(sequence.reusable_hashes)
        before = (*self.running, *self.loading, *self.awaiting, *self.waiting)
        is_batch = sequence.spec.is_batch
        self.deadlines.check(sequence, (s for s in before if is_batch or not s.spec.is_batch))

    def find_late(self) -> list[tuple[Sequence, Overloaded]]:
        """Returns each sequence whose first token would be late, with the error for its client.
        Leaves out sequences whose computation has begun, and lines of batches, which have no
        deadline."""
        others = [s for s in (*self.running, *self.waiting) if not s.spec.is_batch]
        return list(self.deadlines.find_late(others))

    def returnable(self, sequence_ids: Collection[str]) -> list[Sequence]:
        """Returns those of the given sequences that another worker may compute instead, the oldest
        first. They wait and hold no blocks.

        Sequences that wait for a grammar or for blocks are left out. Another worker would wait for
        the grammar too, or would have to compute the blocks that are about to be available here.
        """
        return [
            s
            for s in self.waiting
            if s.sequence_id in sequence_ids
            and s.has_waited  # a sequence that has not waited yet may start in the next step
            and not (s.is_begun or s.num_preemptions or s.awaits_grammar or self._awaits_blocks(s))
        ]

    def has_work(self) -> bool:
        if self.running or self.loads.has_work(self.loading) or self.find_late():
            return True
        oldest = self._next_waiting()
        return oldest is not None and self._find_start(oldest, Schedule()) is not None

    def awaits_threads(self) -> bool:
        """Returns whether a thread is compiling the grammar of a waiting sequence or reading an
        adapter."""
        return self._adapters.is_reading or any(s.awaits_grammar for s in self.waiting)

    def schedule(self) -> Schedule:
        """Plans a step. Admissions and preemptions take effect at once. The caller need not compute
        the planned chunks."""
        schedule = Schedule()
        self._make_room()
        preempted = self._plan_decode(schedule)
        for sequence in self.running:
            if not sequence.in_decode and not sequence.awaits_mask:
                self._add_chunk(schedule, sequence)
        for sequence in self.loading:
            self._compute_meanwhile(schedule, sequence)
        # No admission after a preemption: blocks are scarce, and a sequence admitted now would be
        # the next to be preempted.
        if not preempted:
            self._admit(schedule)
        for chunk in schedule.chunks:
            chunk.sequence.is_begun = True
        self._count_apart(schedule)
        self._have_waited()
        return schedule

    def admit(self) -> Schedule:
        """Admits sequences while a step that was launched ahead is computed. The chunks of the
        result are not computed; a later plan has them again."""
        schedule = Schedule()
        self._admit(schedule)
        self._have_waited()
        return schedule

    def add_drafts(self, schedule: Schedule) -> None:
        """Adds proposed tokens to the chunks of decoding sequences, the most likely tokens first,
        as far as they are worth their time. A step that computes a prompt gets none.

        The caller must compute the planned chunks, and must then release the blocks that only the
        proposed tokens needed. These blocks are taken last, and only from the FREE ones, so no
        sequence is preempted and no cached block is evicted for them.
        """
        if schedule.work.prefill_tokens or self._speculator.stats is None:
            return
        # A state takes in a rejected token only on a scratch slot, so the tokens before it are
        # computed again. They have no proposed tokens beside them.
        able = [
            (place, chunk.sequence)
            for place, chunk in enumerate(schedule.chunks)
            if (chunk.samples and not chunk.all_logits and chunk.sequence.in_decode)
            and (chunk.num_tokens == 1 or not self._kv.has_states)
        ]
        room = min(DRAFTS_MAX, self._max_tokens_per_step - schedule.work.num_tokens)
        if self._draft_model is not None:
            self._draft_model.prepare(
                [sequence for _, sequence in able],
                schedule.work,
                sequences_max=self._kv.num_scratch if self._kv.has_states else len(able),
                tokens_max=room,
            )
        proposals: dict[int, Proposal] = {}
        for place, sequence in able:
            proposal = sequence.propose()
            if proposal.token_ids:
                proposals[place] = proposal
        if self._kv.has_states and len(proposals) > self._kv.num_scratch:
            best = sorted(proposals, key=lambda place: -sum(proposals[place].probabilities))
            proposals = {place: proposals[place] for place in best[: self._kv.num_scratch]}
        if not proposals:
            return
        # The probabilities of one proposal descend, so the sort keeps the order of its tokens.
        ranked = sorted(
            (
                (probability, place)
                for place, proposal in proposals.items()
                for probability in proposal.probabilities
            ),
            key=lambda each: -each[0],
        )
        gains = [probability for probability, _ in ranked[:room]]
        worth = self._speculator.num_worthwhile(gains, schedule.work)
        counts = Counter(place for _, place in ranked[:worth])
        for place, count in counts.items():
            tables = schedule.chunks[place].sequence.tables
            num_tokens = schedule.chunks[place].sequence.num_tokens
            covered = self._kv.extend_free(tables, num_tokens + count)
            if covered > num_tokens:
                drafts = proposals[place].token_ids[: covered - num_tokens]
                schedule.add_drafts(place, drafts, self._kv.take_scratch(tables))
            else:
                self._kv.trim(tables, num_tokens)

    def schedule_ahead(self, places: Mapping[str, int], max_model_len: int) -> Schedule | None:
        """Plans the next decode step before the tokens of the current step are known.

        `places` maps the id of each sequence whose next token is being sampled to the token's place
        among the sampled tokens. Returns None if the next step cannot be planned yet: it would
        compute a prompt, admit or preempt a sequence, or depends on the tokens.
        """
        if self.loads.has_work(self.loading):
            return None
        if self._has_lines and self.waiting and not self.waiting[0].spec.is_batch:
            return None  # a line may have to make room
        schedule = Schedule(is_ahead=True)
        gains: list[float] = []
        tokens_max = min(self._max_num_seqs, self._max_tokens_per_step)
        for sequence in self._in_turn():
            place = places.get(sequence.sequence_id)
            if place is None and sequence.awaits_mask:
                continue
            if place is None and not (sequence.in_decode and sequence.num_missing_tokens == 1):
                return None
            if sequence.mode is Mode.PREFILL_ONLY:
                continue  # another worker decodes it
            if sequence.drafter is not None:
                gains += sequence.propose().probabilities
            if place is not None and sequence.ends_with_next(max_model_len):
                if self.waiting:
                    return None  # a waiting sequence may take the place of this one
                continue
            num_tokens = len(sequence.token_ids) + (place is not None)
            if (
                not sequence.may_run_ahead
                or len(schedule.chunks) >= tokens_max
                or not (
                    self._has_room(sequence, num_tokens)
                    or self._kv.extend(sequence.tables, num_tokens) == num_tokens
                )
            ):
                return None
            schedule.add_ahead(sequence, place)
        if not schedule.chunks:
            return None
        # A step that is launched ahead verifies no proposals.
        gains.sort(reverse=True)
        if gains and self._speculator.num_worthwhile(gains, schedule.work):
            return None
        oldest = self._next_waiting()
        if oldest is not None and self._find_start(oldest, schedule) is not None:
            return None
        self._count_apart(schedule)
        return schedule

    def _have_waited(self) -> None:
        for sequence in (*self.waiting, *self.running):
            sequence.has_waited = True

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raises AssertionError if a queue does not have exactly the sequences with its status, if
        a queue is out of order, if a WAITING sequence has blocks, or if another one has none."""
        for queue, status in (
            (self.waiting, Status.WAITING),
            (self.running, Status.RUNNING),
            (self.awaiting, Status.WAITING_FOR_KV),
            (self.loading, Status.LOADING),
        ):
            expected = sorted(s.sequence_id for s in sequences if s.status is status)
            found = sorted(s.sequence_id for s in queue)
            assert found == expected, f"{status.value}: {found}, expected {expected}"
        for queue in (self.waiting, self.running):
            order = [_order(s) for s in queue]
            assert order == sorted(order), f"a queue is out of order: {order}"
        for sequence in sequences:
            held = len(sequence.block_table)
            assert (held == 0) == (sequence.status is Status.WAITING), (
                f"sequence {sequence.sequence_id} is {sequence.status.value} and has {held} blocks"
            )

    def _plan_decode(self, schedule: Schedule) -> bool:
        """Plans the tokens of the decoding sequences. Returns whether a sequence was preempted."""
        num_waiting = len(self.waiting)
        decoding = [s for s in self._in_turn() if s.in_decode and not s.awaits_mask]
        for sequence in decoding:
            if schedule.work.num_tokens >= self._max_tokens_per_step:
                break
            if len(schedule.chunks) >= self._max_num_seqs:
                break
            if sequence.status is Status.RUNNING and self._grow(sequence):
                tokens_left = self._max_tokens_per_step - schedule.work.num_tokens
                schedule.add(sequence, min(sequence.num_next_tokens, tokens_left))
        return len(self.waiting) > num_waiting

    def _in_turn(self) -> list[Sequence]:
        """Returns the running sequences, without those lines of batches that pause because they
        would delay the steps of other sequences."""
        if not self._lines_pause:
            return self.running
        others = [s for s in self.running if not s.spec.is_batch]
        rate = self._step_time.decode_rate or self._unmeasured.decode
        num_lines = int(rate.num_lines_beside(sum(s.in_decode for s in others)))
        lines = [s for s in self.running[len(others) :] if s.in_decode]
        return others + lines[:num_lines]

    @property
    def _lines_pause(self) -> bool:
        """True if lines of batches should not delay the next step, because it computes other
        sequences."""
        if not self._has_lines or self._num_steps_apart >= LINES_STEPS_APART:
            return False
        others = (s for s in self.running if not s.spec.is_batch)
        return any(not s.awaits_mask for s in others) or self._other_starts(Schedule())

    @property
    def _has_lines(self) -> bool:
        """True if a line of a batch runs or waits. In each queue, lines come last."""
        return any(queue and queue[-1].spec.is_batch for queue in (self.running, self.waiting))

    def _count_apart(self, schedule: Schedule) -> None:
        if self._has_lines:
            with_lines = any(chunk.sequence.spec.is_batch for chunk in schedule.chunks)
            self._num_steps_apart = 0 if with_lines else self._num_steps_apart + 1

    def _make_room(self) -> None:
        """Preempts lines of batches, the youngest first, while another waiting sequence cannot be
        admitted."""
        while self._has_lines and self.waiting and not self.waiting[0].spec.is_batch:
            first = self._next_waiting()
            if first is None or first.spec.is_batch or self._find_start(first, Schedule()):
                return
            lines = (s for s in reversed(self.running) if s.spec.is_batch)
            victim = next((s for s in lines if s.mode is not Mode.PREFILL_ONLY), None)
            if victim is None:
                return
            self._preempt(victim)

    def _admit(self, schedule: Schedule) -> None:
        while (sequence := self._next_waiting()) and (
            start := self._find_start(sequence, schedule)
        ):
            start = self._plan_load(sequence, start)
            tables = self._kv.reserve(sequence.demand(start, loaded=sequence.loading.end))
            assert tables is not None
            self.early_reuse.end(sequence)
            schedule.copies += sequence.hold(tables, start)
            if sequence.loading.end:
                self.withdraw(sequence)
                sequence.status = Status.LOADING
                self.loading.append(sequence)
                self.loads.start(sequence, start)
                if sequence.loading.computes:
                    schedule.admitted.append(sequence)
                    self._compute_meanwhile(schedule, sequence)
                continue
            schedule.admitted.append(sequence)
            self.enter(sequence)
            if sequence.status is Status.RUNNING:
                self._add_chunk(schedule, sequence)

    def _plan_load(self, sequence: Sequence, start: SequenceStart) -> SequenceStart:
        """Decides which blocks of a sequence that is being admitted are loaded from a tier. Returns
        the start with this load."""
        prefilling = [s for s in self.running if not s.in_decode]
        sequence.loading = loading = self.loads.plan(
            sequence,
            start,
            queued_tokens=sum(s.num_missing_tokens for s in prefilling),
            num_delayed=len(self.running) - len(prefilling) + len(self.waiting) - 1,
        )
        if not loading.awaits:
            sequence.stop_awaiting_kv()
        if not loading.end:
            return start
        after = self.loads.start_after_load(sequence, start, loading.end)
        assert after is not None, "the room was found before"
        return after

    def _compute_meanwhile(self, schedule: Schedule, sequence: Sequence) -> None:
        """Plans a chunk of a LOADING sequence. The chunk ends before the first block that the load
        has begun to read."""
        tokens_left = self._tokens_left(schedule, sequence, sequence.num_computed_tokens)
        if len(schedule.chunks) < self._max_num_seqs:
            num_tokens = self.loads.find_chunk(sequence, tokens_left)
            if num_tokens and (num_tokens := self.loads.take_chunk(sequence, num_tokens)):
                schedule.add(sequence, num_tokens)

    def _next_waiting(self) -> Sequence | None:
        """Returns the oldest waiting sequence that can start: its grammar and adapter are ready,
        it need not wait for blocks of other sequences, and it leaves slots to peers.

        If a sequence gets no slot for its adapter, all younger sequences with adapters are skipped
        too. Otherwise the younger ones might keep all slots in use for ever.
        """
        is_full = False
        for sequence in self.waiting:
            if sequence.awaits_grammar or self._awaits_blocks(sequence):
                continue
            if not self._leaves_slots(sequence):
                continue
            if (adapter := sequence.spec.adapter) is None:
                return sequence
            if not is_full:
                state = self._adapters.request(adapter, self._adapters_in_use)
                if state is AdapterSlotState.LOADED:
                    return sequence
                is_full = state is AdapterSlotState.NO_SLOT
        return None

    def _awaits_blocks(self, sequence: Sequence) -> bool:
        awaits = self.early_reuse.awaits(sequence, running=self.running, awaiting=self.awaiting)
        return awaits or self.loads.awaits_lookup(sequence, self._kv)

    def _adapters_in_use(self) -> set[str]:
        of_admitted = (s.spec.adapter for s in (*self.running, *self.awaiting, *self.loading))
        return {adapter.digest for adapter in of_admitted if adapter is not None}

    def _find_start(self, sequence: Sequence, schedule: Schedule) -> SequenceStart | None:
        """Returns how a sequence would start. Returns None if the sequence gets no running slot or
        its blocks cannot be reserved."""
        if not self._has_slot(sequence, schedule):
            return None
        depth = self._kv.match(sequence.reusable_hashes)
        parent = find_parent(sequence, self.running, depth)
        part = self._kv.find_partial_block(*sequence.reusable_part(depth))
        # Tries to start with a copy of the partly matching block. If that fails, tries without it,
        # because the pool may have to evict this block to make room. Without frozen states a
        # sequence cannot start here, so it takes their slots if there are no others.
        starts = [sequence.plan(depth, parent, part)]
        if not self._kv.has_states:
            starts.append(sequence.plan(depth, parent))
        elif starts[0].sources:
            starts.append(starts[0].taking_states())
        for start in starts:
            if self._kv.can_reserve(sequence.demand(start)):
                return start
        return None

    def _leaves_slots(self, sequence: Sequence) -> bool:
        """Returns whether the slots of states suffice for a prompt that a peer may want from this
        worker, if this sequence starts, too. Sequences that await states from a peer must leave so
        many, because two workers may prefill for each other. Other sequences end by themselves."""
        if not self._kv.has_states or sequence.mode is not Mode.WAITING_FOR_REMOTE_KV:
            return True
        awaiting = [s for s in self.awaiting if s.mode is Mode.WAITING_FOR_REMOTE_KV]
        num_held = 2 + sum(1 + (s.tables.checkpoint > 0) for s in awaiting)
        return num_held + self._num_slots_left <= self._kv.num_slots

    def _has_slot(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Returns whether a sequence can be admitted in addition to those that are admitted
        already.

        A sequence that will decode here needs a running slot, and the number of admitted sequences
        must stay within `max_num_seqs`. Sequences that await KV count too. Otherwise they could
        fill every step once their KV has arrived, and no prompt would be computed. A PREFILL_ONLY
        sequence does not wait for sequences that await KV, because two workers may prefill for each
        other.
        """
        if sequence.mode is not Mode.PREFILL_ONLY:
            admitted = (*self.running, *self.awaiting, *self.loading)
            slot = len(admitted) < self._max_num_seqs
            num_taken = sum(s.mode is not Mode.PREFILL_ONLY for s in admitted)
            slot = slot and num_taken < self.num_running_slots
        else:
            queue = self.awaiting if sequence.may_wait_for_remote_kv else self.running
            slot = len(queue) + len(self.loading) < self._max_num_seqs
        if not sequence.may_wait_for_remote_kv:
            slot = slot and self._tokens_left(schedule, sequence, 0) > 0
        return slot

    @property
    def spare_blocks(self) -> list[int]:
        """For each KV group, the number of blocks that the running sequences need for their next
        `_GROWTH_TOKENS` tokens. A load for a peer leaves these blocks, so that no sequence is
        preempted because of it."""
        layout = self._kv.layout
        spare = [0] * len(layout.groups)
        for sequence in self.running:
            end = sequence.num_tokens + sequence.growth(_GROWTH_TOKENS)
            for group, num_blocks in enumerate(layout.sequence_blocks(end)):
                spare[group] += max(0, num_blocks - len(sequence.tables.held(group)))
        return spare

    @property
    def num_running_slots(self) -> int:
        """Number of sequences that may decode at the same time (running_slots.py)."""
        return num_running_slots(
            self._step_time.decode_rate,
            max_num_seqs=self._max_num_seqs,
            itl_limit_s=self._itl_limit_s,
        )

    def _prefill_rates(self) -> WorkerRates | None:
        """Returns how fast this engine computes prompts in steps that also decode its current
        sequences. Returns None before this was measured."""
        rates = self._step_time.rates(self._unmeasured)
        num_decoding = sum(s.in_decode and not s.spec.is_batch for s in self.running)
        return beside_decode(rates, self.chunk_tokens, num_decoding) if rates.measured else None

    def _has_rates(self) -> bool:
        return self._step_time.has_measured_prefill

    @property
    def chunk_tokens(self) -> int:
        """Largest number of tokens for the first chunk of a prompt, in a step that also decodes the
        current sequences."""
        decoding = [s for s in self.running if s.in_decode and not s.spec.is_batch]
        contexts = sum(s.num_computed_tokens for s in decoding)
        work = StepWork(decode_tokens=len(decoding), decode_contexts=contexts)
        return self._all_tokens_left(Schedule(work=work), 0)

    def _tokens_left(self, schedule: Schedule, sequence: Sequence, context: int) -> int:
        """Returns the largest number of tokens that a chunk of a sequence may have in this step,
        after the sequence's first `context` tokens.

        Lines of batches get no tokens in a step with other prompts, and few in other steps.
        """
        tokens_left = self._all_tokens_left(schedule, context)
        if not tokens_left:
            return 0
        if not sequence.spec.is_batch:
            return tokens_left if self._may_join(schedule, sequence, tokens_left) else 0
        num_taken = schedule.num_line_tokens
        is_apart = self._lines_pause and schedule.work.decode_tokens > 0
        if is_apart or schedule.work.prefill_tokens > num_taken or self._other_starts(schedule):
            return 0
        rate = self._step_time.prefill_rate or self._unmeasured.prefill
        token_s = max(1e-9, rate.token_s + context * rate.token_context_s)
        in_time = int((_LINES_STEP_S - rate.step_s) / token_s)
        return max(0, min(tokens_left, max(_LINES_TOKENS_MIN, in_time) - num_taken))

    def _may_join(self, schedule: Schedule, sequence: Sequence, tokens_left: int) -> bool:
        """Returns whether a prompt should be computed in the same step as those that the step has.

        A step with one more prompt takes longer, which delays the prompts that it has already. It
        saves a step for the new prompt and for all prompts that wait. If a step takes 5 ms before
        its first token, and a prompt takes 150 ms, it is computed apart unless about 30 prompts
        wait. On a GPU, short prompts are nearly always computed together.
        Prompts without a deadline are computed together, too: nobody waits for their first tokens.
        """
        if not sequence.spec.first_token_by:
            return True
        if schedule.is_closed:
            return False
        num_prompts = schedule.num_prompts
        rates = self.deadlines.rates() if num_prompts and not schedule.work.decode_tokens else None
        if rates is None:
            return True
        rate = rates.prefill
        num_missing, context = sequence.missing_span
        num_tokens = min(tokens_left, num_missing)
        own_s = rate.seconds(num_tokens, context, num_tokens) - rate.step_s
        schedule.is_closed = rate.step_s * (1 + len(self.waiting)) < num_prompts * own_s
        return not schedule.is_closed

    def _other_starts(self, schedule: Schedule) -> bool:
        """Returns whether a waiting sequence that is no line of a batch can be admitted now."""
        if not self.waiting or self.waiting[0].spec.is_batch:
            return False
        first = self._next_waiting()
        if first is None or first.spec.is_batch:
            return False
        return self._find_start(first, schedule) is not None

    def _all_tokens_left(self, schedule: Schedule, context: int) -> int:
        tokens_left = self._max_tokens_per_step - schedule.work.num_tokens
        in_time = self._step_time.chunk_max(schedule.work, context)
        return max(0, tokens_left if in_time is None else min(tokens_left, in_time))

    def _add_chunk(self, schedule: Schedule, sequence: Sequence) -> None:
        tokens_left = self._tokens_left(schedule, sequence, sequence.num_computed_tokens)
        if sequence.wants_prompt_logits:
            tokens_left = min(tokens_left, PROMPT_LOGITS_MAX - schedule.num_prompt_logits)
        if not tokens_left or len(schedule.chunks) >= self._max_num_seqs:
            return
        if sequence.mode is Mode.PREFILL_ONLY:
            num_tokens = self._chunk_prefill_only(sequence, tokens_left)
        else:
            num_tokens = min(sequence.num_missing_tokens, tokens_left)
        num_tokens = min(num_tokens, sequence.num_next_tokens)
        if sequence.needs_mask_first:
            num_tokens = min(num_tokens, sequence.num_missing_tokens - 1)
        num_tokens = self._with_images(sequence, num_tokens)
        # Shortens the chunk if the pool of a window has too few blocks, because other sequences
        # hold blocks for their own chunks.
        end = self._kv.extend(sequence.tables, sequence.num_computed_tokens + num_tokens)
        if end > sequence.num_computed_tokens:
            schedule.add(sequence, end - sequence.num_computed_tokens)

    def _with_images(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the size of a chunk of at most `num_tokens` tokens that ends before the first
        image whose embedding is not computed yet. Embeddings that are needed later are begun, too,
        and those of computed tokens are dropped."""
        if not sequence.spec.images:
            return num_tokens
        first = sequence.num_computed_tokens
        end = first + num_tokens
        needed = {}
        for image in sequence.missing_images:
            rows = sequence.image_rows.get(image.digest)
            if rows is None:
                rows = self._images.find(image, sequence.spec.cache_salt)
            if rows is not None:
                needed[image.digest] = rows
            else:
                end = min(end, *(at for at, _ in image.rows_in(first, end)), end)
        sequence.image_rows = needed
        return end - first

    def computed(self, chunk: Chunk) -> None:
        """Updates `pull_lag_s` of a chunk's sequence: the seconds for which the consumer still
        pulls once the chunk is computed. Must be called before the chunk's tokens count as
        computed."""
        sequence = chunk.sequence
        link = self._link(sequence)
        rate = self._step_time.prefill_rate
        if link is not None and rate is not None:
            sequence.pull_lag_s = lag_after(
                chunk.num_tokens, sequence.num_computed_tokens, sequence.pull_lag_s, rate, link
            )

    def _link(self, sequence: Sequence) -> Link | None:
        if sequence.spec.consumer_rate is None:
            return None
        layout = self._kv.layout
        latency_s, bytes_per_s = sequence.spec.consumer_rate
        size = layout.block_size
        resume = sequence.last_depth * layout.block_size
        windows = tuple(
            (group.first_seen(resume) * size, group.layout.block_bytes / size / bytes_per_s)
            for group in layout.groups
            if group.window is not None
        )
        return Link(latency_s, layout.block_bytes / size / bytes_per_s, windows)

    def _chunk_prefill_only(self, sequence: Sequence, tokens_left: int) -> int:
        """Returns the size of the next chunk of a PREFILL_ONLY sequence, chosen so that the
        consumer has all blocks as soon as possible (chunking.py)."""
        num_missing = sequence.num_missing_tokens
        rate = self._step_time.prefill_rate
        link = self._link(sequence)
        if link is None or rate is None:
            return tail_chunk(
                num_missing, tokens_left=tokens_left, budget=self._max_tokens_per_step
            )
        return next_chunk(
            num_missing,
            context=sequence.num_computed_tokens,
            lag_s=sequence.pull_lag_s,
            tokens_left=tokens_left,
            budget=self._max_tokens_per_step,
            rate=rate,
            link=link,
        )

    def _grow(self, sequence: Sequence) -> bool:
        """Allocates a block if a decoding sequence needs one for its next token. If no block is
        available, younger sequences are preempted.

        Returns False if the sequence itself was preempted, because there was no younger one.
        """
        num_tokens = sequence.num_tokens
        if self._has_room(sequence, num_tokens):
            return True
        while self._kv.extend(sequence.tables, num_tokens) < num_tokens:
            victim = next(
                (s for s in reversed(self.running) if s.mode is not Mode.PREFILL_ONLY), sequence
            )
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """A fast test whether the blocks of a sequence have room for so many tokens, for models
        with one KV group: in most steps the last block has room."""
        table = sequence.tables.ids[0]
        return not self._kv.has_windows and len(table) * sequence.block_size >= num_tokens

    def _preempt(self, sequence: Sequence) -> None:
        self.withdraw(sequence)
        self._kv.release(sequence.release_tables())
        sequence.num_preemptions += 1
        self.enqueue(sequence)
