"""Plans each step: what it computes, which sequences get blocks, and which are preempted.

It knows sequences and the block pool, no tensors. A step's token budget goes to decode first, then
to prefill in the order of arrival, in chunks that delay those who decode by no more than is wanted
(perf_model/step_time.py); then waiting sequences are admitted, oldest first.

A sequence of which a tier below the pool has more blocks than the pool is LOADING first, while
others step. It has all its blocks then, and is like one that waits for KV. It may compute its
first blocks meanwhile (loads.py), with what all others leave of a step.

Blocks: admission reserves all that a sequence's tokens need, or the sequence waits and holds
nothing. Of a KV group with a window these are the blocks of a decode step; what a chunk needs
besides is taken as it is planned, and given back when it is computed. While a sequence decodes it
takes one more block when its last is full; when the pool has none, the youngest running sequence
is preempted: it gives its blocks back, waits again by its age, and computes them again. Never
preempted: LOADING and WAITING_FOR_KV (reads are in flight) and PREFILL_ONLY (a consumer trusts its
blocks). One that awaits its prefix only (`prefix_blocks`) was admitted with all its blocks too;
after that it is like any other, and preempted it awaits nothing any more.

Two sequences cannot preempt each other for ever. None takes blocks from an older one: without a
younger victim it preempts itself. Waiting sequences are admitted by age, so that no younger one
comes in before it. An admitted sequence makes at least one token before it can need another block.
So the oldest of all gets on with every admission, and it waits only for blocks that are lent to
peers or awaited, whose leases have deadlines.
"""

from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from tandem.engine.adapter_slots import AdapterSlots, Answer
from tandem.engine.admission import Admission
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.scheduler.chunking import Link, lag_after, next_chunk, tail_chunk
from tandem.engine.scheduler.early_reuse import EarlyReuse, find_parent
from tandem.engine.scheduler.loads import Loads
from tandem.engine.scheduler.running_slots import num_running_slots
from tandem.engine.scheduler.schedule import Chunk, Schedule
from tandem.engine.sequence import Sequence, Status
from tandem.engine.tiers.tiers import Tiers
from tandem.engine.types import Mode
from tandem.perf_model.step_time import StepTimeModel, StepWork

# Rows of logits in a step for log probabilities of prompts: each has 0.6 MB for 150,000 tokens.
PROMPT_LOGITS_MAX = 128

_arrival = attrgetter("arrival")


class Scheduler:
    """Queues of one engine. `waiting` and `running` are sorted by arrival."""

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
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.awaiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.early_reuse = EarlyReuse(kv, shared_wait_s)
        self._kv = kv
        self.loads = Loads(tiers, kv, step_time, max_tokens_per_step)
        self._step_time = step_time
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens_per_step
        self._itl_limit_s = itl_limit_s
        self._adapters = adapters

    def enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_arrival)

    def start(self, sequence: Sequence) -> None:
        """A sequence that has all its blocks, and awaits none of them, joins the running ones."""
        self.withdraw(sequence)
        sequence.await_nothing()
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_arrival)

    def start_here(self, sequence: Sequence) -> None:
        """A sequence for which no KV came joins the running ones. With windows or a KV budget it
        waits first: it holds no block but those that were to come."""
        if self._kv.passes(sequence.tables):
            self.begin_again(sequence)
        else:
            self.start(sequence)

    def begin_again(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """A sequence that awaited KV gives back its blocks and waits again, to be computed here. A
        window that came for one depth is of no use at another."""
        self.withdraw(sequence)
        self._kv.give_back(sequence.let_go(), unsafe_blocks)
        sequence.await_nothing()
        self.enqueue(sequence)

    def enter(self, sequence: Sequence) -> None:
        """A sequence that has its blocks awaits KV from outside, or joins the running ones."""
        self.withdraw(sequence)
        if sequence.lacks_kv:
            sequence.status = Status.WAITING_FOR_KV
            self.awaiting.append(sequence)
        else:
            self.start(sequence)

    def compute_instead(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """A sequence whose load failed gives back its blocks and waits to be computed."""
        self.withdraw(sequence)
        self._kv.give_back(sequence.let_go(), unsafe_blocks)
        sequence.may_load = False
        self.enqueue(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes the sequence out of the queue it is in; its blocks stay its own."""
        for queue in (self.waiting, self.running, self.awaiting, self.loading):
            if sequence in queue:
                queue.remove(sequence)

    def has_work(self) -> bool:
        if self.running or any(self.loads.find_chunk(s, self._max_tokens) for s in self.loading):
            return True
        oldest = self._next_waiting()
        return oldest is not None and self._admission(oldest, Schedule()) is not None

    def awaits_threads(self) -> bool:
        """Returns True while a waiting sequence's grammar is compiled, or an adapter is read."""
        return self._adapters.is_reading or any(s.awaits_grammar for s in self.waiting)

    def schedule(self) -> Schedule:
        """Plans a step. Admission and preemption happen here; a chunk may be left uncomputed."""
        schedule = Schedule()
        preempted = self._plan_decode(schedule)
        for sequence in self.running:
            if not sequence.in_decode:
                self._add_chunk(schedule, sequence)
        for sequence in self.loading:
            self._compute_meanwhile(schedule, sequence)
        if not preempted:  # else blocks are short: who came in now would be the next victim
            self._admit(schedule)
        return schedule

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raises AssertionError when a sequence is not in exactly the queue of its status."""
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
            arrivals = [s.arrival for s in queue]
            assert arrivals == sorted(arrivals), f"a queue is out of order: {arrivals}"
        for sequence in sequences:
            held = len(sequence.block_table)
            assert (held == 0) == (sequence.status is Status.WAITING), (
                f"sequence {sequence.sequence_id} is {sequence.status.value} and has {held} blocks"
            )

    def _plan_decode(self, schedule: Schedule) -> bool:
        """Plans the sequences that decode; returns whether one was preempted."""
        num_waiting = len(self.waiting)
        for sequence in [s for s in self.running if s.in_decode]:
            if schedule.work.num_tokens >= self._max_tokens:
                break
            if len(schedule.chunks) >= self._max_num_seqs:
                break
            if sequence.status is Status.RUNNING and self._grow(sequence):
                tokens_left = self._max_tokens - schedule.work.num_tokens
                schedule.add(sequence, min(sequence.num_next_tokens, tokens_left))
        return len(self.waiting) > num_waiting

    def _admit(self, schedule: Schedule) -> None:
        while (sequence := self._next_waiting()) and (
            admission := self._admission(sequence, schedule)
        ):
            self._plan_load(sequence, admission)
            if sequence.loading.end:
                admission = self.loads.admission(sequence, admission.num_cached_blocks)
            tables = self._kv.reserve(
                sequence.reusable_hashes,
                admission.num_cached_blocks,
                num_tokens=sequence.num_tokens,
                resume=admission.resume,
                sources=admission.sources,
                budget=sequence.spec.kv_budget,
                loaded=sequence.loading.end,
            )
            assert tables is not None
            self.early_reuse.end(sequence)
            schedule.copies += sequence.hold(tables, admission)
            if sequence.loading.end:
                self.withdraw(sequence)
                sequence.status = Status.LOADING
                self.loading.append(sequence)
                self.loads.start(sequence)
                if sequence.loading.computes:
                    schedule.admitted.append(sequence)
                    self._compute_meanwhile(schedule, sequence)
                continue
            schedule.admitted.append(sequence)
            self.enter(sequence)
            if sequence.status is Status.RUNNING:
                self._add_chunk(schedule, sequence)

    def _plan_load(self, sequence: Sequence, admission: Admission) -> None:
        """Decides what of a sequence comes from a tier, at its admission."""
        prefilling = [s for s in self.running if not s.in_decode]
        sequence.loading = loading = self.loads.plan(
            sequence,
            admission,
            queued_tokens=sum(s.num_missing_tokens for s in prefilling),
            num_delayed=len(self.running) - len(prefilling) + len(self.waiting) - 1,
        )
        if not loading.awaits:
            sequence.await_nothing()

    def _compute_meanwhile(self, schedule: Schedule, sequence: Sequence) -> None:
        """Plans a chunk of a LOADING sequence, before the blocks that are read now."""
        tokens_left = self._tokens_left(schedule, sequence.num_computed_tokens)
        if len(schedule.chunks) < self._max_num_seqs:
            num_tokens = self.loads.find_chunk(sequence, tokens_left)
            if num_tokens and (num_tokens := self.loads.take_chunk(sequence, num_tokens)):
                schedule.add(sequence, num_tokens)

    def _next_waiting(self) -> Sequence | None:
        """Returns the oldest that lacks neither its grammar nor its adapter, and whose next block
        does not come for another: meanwhile others go first. Not so where adapters' slots are all
        in use: then no younger one with an adapter goes first, or a slot might never be free."""
        is_full = False
        for sequence in self.waiting:
            if sequence.awaits_grammar or self._awaits_blocks(sequence):
                continue
            if (adapter := sequence.spec.adapter) is None:
                return sequence
            if not is_full:
                answer = self._adapters.want(adapter, self._adapters_in_use)
                if answer is Answer.LOADED:
                    return sequence
                is_full = answer is Answer.FULL
        return None

    def _awaits_blocks(self, sequence: Sequence) -> bool:
        others = {"running": self.running, "awaiting": self.awaiting, "loading": self.loading}
        awaits = self.early_reuse.awaits(sequence, **others)
        return awaits or self.loads.awaits_lookup(sequence, self._kv)

    def _adapters_in_use(self) -> set[str]:
        of_admitted = (s.spec.adapter for s in (*self.running, *self.awaiting, *self.loading))
        return {adapter.digest for adapter in of_admitted if adapter is not None}

    def _admission(self, sequence: Sequence, schedule: Schedule) -> Admission | None:
        """Returns how a sequence starts now; None without a running slot or room for its blocks."""
        if not self._has_slot(sequence, schedule):
            return None
        depth = self._kv.match(hashes := sequence.reusable_hashes)
        parent = find_parent(sequence, self.running, depth)
        part = self._kv.find_beginning(*sequence.wanted_after(depth))
        for each in (part, None):  # the block with the part may be one that has to be evicted
            admission = sequence.plan(depth, parent, each)
            if self._kv.can_reserve(
                hashes,
                depth,
                num_tokens=sequence.num_tokens,
                resume=admission.resume,
                sources=admission.sources,
                budget=sequence.spec.kv_budget,
            ):
                return admission
        return None

    def _has_slot(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Returns whether there is a running slot beside what is planned.

        A sequence that will decode here waits until each step has a place for it and all before it:
        otherwise those that await KV would, as it comes, keep prompts out of every step. One that
        is for a peer waits for none of those: two workers may work for each other.
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
            slot = slot and self._tokens_left(schedule, 0) > 0
        return slot

    @property
    def num_running_slots(self) -> int:
        """Number of sequences that may decode here at once (running_slots.py)."""
        return num_running_slots(
            self._step_time.decode_rate,
            max_num_seqs=self._max_num_seqs,
            itl_limit_s=self._itl_limit_s,
        )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of prefill in a step, at a prompt's start, beside sequences that decode now."""
        decoding = [s for s in self.running if s.in_decode]
        contexts = sum(s.num_computed_tokens for s in decoding)
        work = StepWork(decode_tokens=len(decoding), decode_contexts=contexts)
        return self._tokens_left(Schedule(work=work), 0)

    def _tokens_left(self, schedule: Schedule, context: int) -> int:
        """Tokens that the step has left for a chunk after `context` others."""
        tokens_left = self._max_tokens - schedule.work.num_tokens
        in_time = self._step_time.chunk_max(schedule.work, context)
        return max(0, tokens_left if in_time is None else min(tokens_left, in_time))

    def _add_chunk(self, schedule: Schedule, sequence: Sequence) -> None:
        tokens_left = self._tokens_left(schedule, sequence.num_computed_tokens)
        if sequence.wants_prompt_logits:
            tokens_left = min(tokens_left, PROMPT_LOGITS_MAX - schedule.num_prompt_logits)
        if not tokens_left or len(schedule.chunks) >= self._max_num_seqs:
            return
        if sequence.mode is Mode.PREFILL_ONLY:
            num_tokens = self._chunk_prefill_only(sequence, tokens_left)
        else:
            num_tokens = min(sequence.num_missing_tokens, tokens_left)
        num_tokens = min(num_tokens, sequence.num_next_tokens)
        # A window may have room for a part only, for as long as others hold what it has passed.
        end = self._kv.extend(sequence.tables, sequence.num_computed_tokens + num_tokens)
        if end > sequence.num_computed_tokens:
            schedule.add(sequence, end - sequence.num_computed_tokens)

    def computed(self, chunk: Chunk) -> None:
        """Updates the pull lag after a chunk was run, before its sequence moves on."""
        sequence, link = chunk.sequence, self._link(chunk.sequence)
        rate = self._step_time.prefill_rate
        if link is not None and rate is not None:
            sequence.pull_lag_s = lag_after(
                chunk.num_tokens, sequence.num_computed_tokens, sequence.pull_lag_s, rate, link
            )

    def _link(self, sequence: Sequence) -> Link | None:
        if sequence.spec.consumer_rate is None:
            return None
        layout, (latency_s, bytes_per_s) = self._kv.layout, sequence.spec.consumer_rate
        size, resume = layout.block_size, sequence.last_depth * layout.block_size
        windows = tuple(
            (group.first_seen(resume) * size, group.layout.block_bytes / size / bytes_per_s)
            for group in layout.groups
            if group.window is not None
        )
        return Link(latency_s, layout.block_bytes / size / bytes_per_s, windows)

    def _chunk_prefill_only(self, sequence: Sequence, tokens_left: int) -> int:
        """Sizes a chunk, pulled while the next is computed: only the last pull is waited for."""
        num_missing, rate = sequence.num_missing_tokens, self._step_time.prefill_rate
        link = self._link(sequence)
        if link is None or rate is None:
            return tail_chunk(num_missing, tokens_left=tokens_left, budget=self._max_tokens)
        return next_chunk(
            num_missing,
            context=sequence.num_computed_tokens,
            lag_s=sequence.pull_lag_s,
            tokens_left=tokens_left,
            budget=self._max_tokens,
            rate=rate,
            link=link,
        )

    def _grow(self, sequence: Sequence) -> bool:
        """Gives a decoding sequence a block for its next token if it lacks one. Returns False when
        it was preempted itself, for want of a younger one."""
        num_tokens = sequence.num_tokens
        # Most steps need no block: with one group that is seen at once.
        if (
            not self._kv.has_windows
            and len(sequence.block_table) * sequence.block_size >= num_tokens
        ):
            return True
        while self._kv.extend(sequence.tables, num_tokens) < num_tokens:
            victim = next(
                (s for s in reversed(self.running) if s.mode is not Mode.PREFILL_ONLY), sequence
            )
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.withdraw(sequence)
        self._kv.give_back(sequence.let_go())
        sequence.num_preemptions += 1
        self.enqueue(sequence)
