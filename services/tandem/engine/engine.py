"""The engine: one model, its KV pool and its sequences. Each call of `step` schedules, runs the
model once and processes the results.

The engine is synchronous. It knows no network, no asyncio, no Redis and no Ray. The `StepReport` of
a step has all events since the previous report, including events between the two steps. While
`has_work` is False, only a call to the engine or the result of one of the engine's threads can turn
it True. sequence.py lists the states of a sequence, and cache/pool/block_pool.py those of a block.

On a GPU, the forward pass of a decode step is launched ahead: before the tokens of the step before
are on the host. The GPU then computes while the host processes these tokens. A call of `step`:

    host  sample n | launch pass n + 1 | wait for tokens n | process them | next call: sample n + 1
    GPU   pass n         | sample n | pass n + 1 ................................| sample n + 1

The masks, penalties and random numbers of sampling n + 1 depend on tokens n, so it is started by
the next call. The pass takes tokens n from the GPU. Blocks that are released while a pass is in
flight become free when its step has ended, because pulls and loads do not wait for the GPU.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count

import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.perf_model.running_slots import STEP_SHARE
from tandem.common.perf_model.step_time import StepTimeModel, StepWork
from tandem.common.process.priority import LowPriority
from tandem.common.speculation import parse_speculation
from tandem.common.worker_load import WorkerLoad
from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.block_table import check_own, check_trusted
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.cache.layout.kv_groups import divide_pool, num_scratch_slots
from tandem.engine.executor.draft_model import DraftModel
from tandem.engine.executor.sampler import Sampled, StepSampler
from tandem.engine.image_rows import ImageRows
from tandem.engine.kept_chains import KeptChains
from tandem.engine.load import measure_load, measure_stats
from tandem.engine.new_sequences import NewSequences
from tandem.engine.peer_blocks import PeerBlocks
from tandem.engine.report import PendingReport
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.scheduler.schedule import Chunk, Schedule
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.sequence import Sequence, Status, finish_reason
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.make_tiers import make_tiers
from tandem.engine.types import EngineStats, Mode, OnFinal, SequenceSpec, StepReport, TokenLogprobs
from tandem.errors import BadRequest, InternalError, QueueFull, Returned, TandemError
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.masks import MASK_WAIT_S, GrammarMasks, GrammarMatcher
from tandem_kernels.sampling import NO_TOKEN

# Longest time in seconds for which a step without chunks waits for an image's embedding. Commands
# and other events are handled after it.
_IMAGE_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward pass was launched ahead."""

    schedule: Schedule
    logits: torch.Tensor
    started: float  # time of `time.perf_counter()` at which the device could start the pass


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        model_fingerprint: str,
        compiler: GrammarCompiler | None = None,
        start_thread: Callable[[str], JobThread] = IoThread,
        images: ImageRows | None = None,
    ) -> None:
        """Allocates the KV pool. Raises ConfigError.

        Without `compiler`, sequences with a grammar are refused, and without `images`, those with
        images. `start_thread` starts the threads
        that copy blocks between the pool and the tiers below it (host memory, disk, object store).
        """
        self.max_model_len = runner.max_model_len
        self.max_tokens_per_step = config.max_tokens_per_step or runner.tokens_per_step
        config = runner.with_pool_size(config, self.max_tokens_per_step)
        sizes = divide_pool(
            lambda *num_blocks: runner.layout(*num_blocks).of_rank(runner.num_pools),
            config,
            step_tokens=self.max_tokens_per_step,
        ).sizes
        self.layout = runner.layout(*sizes)
        runner.allocate(*sizes)
        self._runner = runner
        self._config = config
        self._adapters = AdapterSlots(
            runner, num_slots=config.max_loras, rank_max=config.max_lora_rank
        )
        self._grammars = GrammarMasks(compiler, runner.vocab_size)
        self._images = images or ImageRows(None, "the model takes text only")
        self._kv = KvCache(
            self.layout,
            report_tokens=config.report_block_tokens,
            num_scratch=num_scratch_slots(config),
        )
        self.unmeasured_rates = self._kv.rates(self.max_tokens_per_step)
        limits_s = [s for s in (config.itl_target_s, STEP_SHARE * config.itl_limit_s) if s]
        self._step_time = StepTimeModel(min(limits_s, default=0.0))
        self._speculator = Speculator(
            None if runner.why_no_speculation else parse_speculation(config.speculative_config),
            self._step_time,
            self.max_model_len,
            has_states=self._kv.has_states,
        )
        self._draft_model: DraftModel | None = None
        if runner.draft is not None:
            self._draft_model = DraftModel(
                runner.draft, config, self._speculator, self.layout.most_blocks
            )
        self._new_sequences = NewSequences(
            runner,
            model_fingerprint,
            self.layout,
            self._grammars,
            self._adapters,
            self._images,
            self._speculator,
        )
        self._tiers = make_tiers(
            config,
            self._kv,
            runner.kv,
            self._new_sequences.identity,
            start_thread,
            runner.tier_blocks if runner.num_pools > 1 else None,
        )
        self.kept = KeptChains(self._kv, self._tiers, config.kv_pin_share)
        # Each running sequence decodes one token per step. If all of them decode, at least one
        # token of the step's budget is left for a prompt.
        max_num_seqs = min(config.max_num_seqs, max(1, self.max_tokens_per_step - 1))
        self._scheduler = Scheduler(
            self._kv,
            self._step_time,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=self.max_tokens_per_step,
            itl_limit_s=config.itl_limit_s,
            shared_wait_s=config.shared_wait_s,
            adapters=self._adapters,
            tiers=self._tiers,
            images=self._images,
            speculator=self._speculator,
            draft_model=self._draft_model,
        )
        self._sequences = LiveSequences()
        self._pending = PendingReport(self.layout)
        self._peer_blocks = PeerBlocks(
            self._kv, self._pending, self._tiers, lambda: self._scheduler.spare_blocks
        )
        # The step's other threads and processes would wait for this thread, so it is not for them.
        has_one_thread = config.num_threads == 1 and config.tensor_parallel == 1
        self._low_priority = LowPriority() if has_one_thread else nullcontext()
        self._steps = count(1)
        self._ahead: LaunchedStep | None = None

    def step(self, on_final: OnFinal | None = None) -> StepReport:
        """Runs the model once and returns all events since the last step.

        Blocks that this engine prefills for peers are passed to `on_final` as soon as their KV is
        final, before this step samples tokens, because the peers wait for them. If `on_final` is
        None, these blocks are listed in the report.
        """
        started = time.perf_counter()
        work = StepWork()
        self._settle_adapters()
        self._tiers.settle()
        self.kept.expire()
        loaded = self._settle_loads()
        for sequence, error in self._scheduler.find_late():
            self._fail(sequence, error)
        self._settle_images()
        late_masks = self._settle_masks()
        ahead = self._ahead
        schedule = self._scheduler.schedule() if ahead is None else self._scheduler.admit()
        if schedule.copies:
            self._runner.copy_blocks(schedule.copies)
            # The source of a copy may be evicted and filled by a pull, so the copy must have ended.
            self._runner.synchronize()
            self._kv.end_copies(schedule.copies)
        for sequence in (*loaded, *schedule.admitted):
            # `write` below chooses which blocks to copy to the tiers by how often they were used,
            # so this sequence's uses must be recorded first.
            self._scheduler.loads.use(sequence)
            self._pending.admitted(sequence)
        self._tiers.write()
        self._pending.report_final(on_final)
        # If a peer waits for the report of reserved or final blocks, this step ends here, so that
        # the report is sent at once. The next step computes the chunks.
        if self._pending.starts_a_transfer:
            pass
        elif ahead is not None:
            self._finish_ahead(ahead, on_final)
            work = ahead.schedule.work
            started = ahead.started
        elif schedule.chunks:
            self._scheduler.add_drafts(schedule)
            self._run(schedule, on_final)
            work = schedule.work
        elif late_masks:
            self._grammars.wait_for_any(late_masks)
        elif self._images.is_computing:
            self._images.wait(_IMAGE_WAIT_S)
        return self._take_report(work, started)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence. Raises BadRequest, ContextTooLong, NeverFits, QueueFull or Overloaded.

        A sequence that was migrated to this engine may already be complete. Then it is reported as
        finished instead of being queued.
        """
        self._check_new(spec.sequence_id)
        self._new_sequences.check(spec)
        self._check_queue(len(self._scheduler.waiting))
        sequence = self._new_sequences.make(spec)
        self._scheduler.check_deadline(sequence)
        sequence.tokens_ahead = sum(s.missing_span[0] for s in self._sequences.values())
        self._enter(sequence)

    def start_local_prefill(self, sequence_id: str) -> None:
        """Starts to compute a WAITING_FOR_REMOTE_KV sequence on this engine. A pull must not have
        filled any of the sequence's blocks. The sequence is not refused as late any more."""
        self._scheduler.start_local(self._sequences.awaiting_all(sequence_id))

    def restart(self, spec: SequenceSpec, unsafe_blocks: Collection[int] = ()) -> None:
        """Discards the pulled KV of a sequence, and queues the sequence again with `spec`. It keeps
        its place in the order of arrival.

        An abandoned pull may still write to `unsafe_blocks` of the sequence. These blocks are
        quarantined, that is, not reused until `unquarantine`. Raises the errors of `add` except
        QueueFull. After an error the sequence is removed.
        """
        old = self._sequences.find(spec.sequence_id)
        if Mode.PREFILL_ONLY in (old.mode, spec.mode):
            raise InternalError(
                f"sequence {spec.sequence_id} cannot be restarted, because this worker computes "
                "only the prompt, for another worker"
            )
        self._drop(old, unsafe_blocks)
        self._new_sequences.check(spec)
        new = self._new_sequences.make(spec, old.arrival)
        new.cached = old.cached
        new.shared_wait_s = old.shared_wait_s
        new.tokens_ahead = old.tokens_ahead
        new.num_preemptions = old.num_preemptions
        self._enter(new)

    def commit(self, sequence_id: str, first_token_id: int, sums: Iterable[float] = ()) -> None:
        """Starts to decode a WAITING_FOR_REMOTE_KV sequence, whose KV is complete and trusted.

        `first_token_id` and `sums` come from the producer's `Prefilled` event. `sums` has the sum
        of attention weights of each block, if the KV budget keeps heavy hitters. The client already
        has the first token, so this engine does not report the token. If the token ends the
        sequence, the engine reports the end.
        """
        sequence = self._sequences.awaiting_all(sequence_id)
        sequence.advance(sequence.num_missing_tokens)
        sequence.tables.set_sums(sequence.num_tokens, list(sums))
        self._store_full_blocks(sequence)
        sequence.take_frozen_states(self._kv)
        sequence.append(first_token_id)
        if not self._end_if_over(sequence):
            self._scheduler.start(sequence)

    def continue_prefill(
        self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int] = ()
    ) -> None:
        """Continues a sequence that waited for its prefix from a peer. The KV of the first
        `num_blocks` blocks, cached or pulled, is complete and trusted. This engine computes the
        tokens after them.

        The pull may still write to `unsafe_blocks`, which come after the first `num_blocks` blocks.
        The unsafe blocks are quarantined, and the sequence gets other blocks instead. Raises
        QueueFull if there are not enough other blocks, and InternalError if the arguments
        contradict the sequence's block table. After an error the sequence is removed.
        """
        sequence = self._sequences.awaiting(sequence_id)
        if sequence.mode is Mode.WAITING_FOR_REMOTE_KV:
            raise InternalError(
                f"sequence {sequence_id} waits for the KV of the whole prompt, not of a prefix"
            )
        try:
            num_stored = sequence.num_stored_blocks
            num_held = len(sequence.block_table)
            check_trusted(sequence_id, num_blocks, num_stored, num_held)
            is_short = self._kv.has_windows and num_blocks < sequence.num_prefix_blocks
            own = self._kv.global_ids(sequence.tables, num_stored if is_short else num_blocks)
            check_own(sequence_id, own, unsafe_blocks)
            if not is_short and not self._kv.replace(sequence.tables, unsafe_blocks):
                raise QueueFull(
                    "the KV pool has too few free blocks for this request: an abandoned pull may "
                    "still write to the request's own blocks. Try again"
                )
        except TandemError:
            self._drop(sequence, unsafe_blocks)
            raise
        if is_short:
            self._scheduler.restart_local(sequence, unsafe_blocks)
            return
        # The last token is computed even if its KV was pulled, because its logits are needed.
        sequence.take_prefix(min(num_blocks, len(sequence.reusable_hashes)))
        self._store_full_blocks(sequence)
        if self._kv.has_states:
            self._freeze_states(sequence)
        if sequence.mode is Mode.PREFILL_ONLY:
            self._pending.final_blocks(sequence)
        self._scheduler.start(sequence)

    def hold_prefix(
        self,
        sequence_id: str,
        block_hashes: list[bytes],
        first_wanted_block: int = 0,
        load_s_max: float = 0.0,
    ) -> None:
        """Keeps the longest cached prefix of the chain `block_hashes` in the pool for a peer, until
        `remove`. A report lists the ids of the kept blocks from index `first_wanted_block` on. This
        is the next report, unless blocks of the chain are loaded from tiers before. They are
        loaded if that is expected to take at most `load_s_max` seconds."""
        self._check_chain(sequence_id)
        self._peer_blocks.hold_prefix(sequence_id, block_hashes, first_wanted_block, load_s_max)

    def import_blocks(self, sequence_id: str, block_hashes: list[bytes]) -> None:
        """Reserves blocks for a chain whose KV will be pulled from a peer. The chain ends with
        `commit_import` or `remove`.

        Only FREE blocks, which are neither referenced nor cached, are reserved. If there are too
        few, only the first blocks of the chain are reserved.
        """
        self._check_chain(sequence_id)
        self._peer_blocks.import_blocks(sequence_id, block_hashes)

    def commit_import(
        self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int] = ()
    ) -> None:
        """Caches the first `num_blocks` blocks of an imported chain and removes the chain. The KV
        of these blocks is complete and trusted. The other blocks are freed, except `unsafe_blocks`:
        the pull may still write to these, so they are quarantined."""
        self._peer_blocks.commit(sequence_id, num_blocks, unsafe_blocks)

    def hot_prefixes(self, blocks_max: int) -> list[list[bytes]]:
        """Returns the most recently used cached chains as lists of block hashes, each from the
        chain's first block on. All lists together have at most `blocks_max` distinct blocks."""
        return self._kv.hot_prefixes(blocks_max)

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the cached block hashes h with `first` <= h < `end`; an empty `end` means no
        upper bound."""
        return self._kv.block_hashes(first, end)

    def tier_block_hashes(self, tier: str, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h of the blocks that a tier can load, with `first` <= h < `end` as in
        `block_hashes`. Returns an empty list if there is no tier of this name."""
        return self._tiers.block_hashes(tier, first, end)

    def reset_prefix_cache(self) -> int:
        """Drops all cached blocks that no sequence references, all copies in tiers, and the answers
        that are kept for proposals. Returns the number of blocks dropped from the pool."""
        self._tiers.reset()
        self._speculator.forget()
        return self._kv.drop_cached()

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int] = ()) -> None:
        """Ends a sequence or chain in any state and frees its blocks. An unknown id is ignored.

        Events of the sequence that are not reported yet are dropped.
        """
        if sequence_id in self._sequences:
            self._drop(self._sequences[sequence_id], unsafe_blocks)
        elif sequence_id in self._peer_blocks:
            self._peer_blocks.remove(sequence_id, unsafe_blocks)
        self._pending.forget(sequence_id)

    def return_waiting(self, sequence_ids: Collection[str], count: int) -> None:
        """Ends at most `count` of these sequences, the oldest first, so that the router can place
        them on another worker. Reports each ended sequence as failed.

        Only sequences that are still in the queue and have no computed tokens are ended
        (`Scheduler.returnable`).
        """
        for sequence in self._scheduler.returnable(sequence_ids)[:count]:
            self._fail(
                sequence,
                Returned(
                    "the worker returned the request to the router, because other requests are "
                    "ahead of it in the worker's queue"
                ),
            )

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """Frees quarantined blocks, because no pull can write to them any more."""
        self._kv.unquarantine(block_ids)

    def block_ids(self, sequence_id: str) -> list[int]:
        """Returns the block ids of a sequence or chain. They do not change while the sequence or
        chain waits for KV from a peer."""
        if sequence_id in self._peer_blocks:
            return self._peer_blocks.block_ids(sequence_id)
        return self._kv.global_ids(self._sequences.find(sequence_id).tables)

    def has_work(self) -> bool:
        has_events = self._pending.has_events or self._kv.has_events or self._adapters.has_results
        has_results = self._tiers.has_results or self._peer_blocks.has_work
        is_ahead = self._ahead is not None
        return has_events or has_results or is_ahead or self._scheduler.has_work()

    def awaits_threads(self) -> bool:
        """Returns True while threads compile a grammar, read an adapter, or copy blocks from or to
        a tier.

        `has_work` may turn True when such a thread finishes. The threads of tiers wake the engine
        then. The caller must poll for the other threads (`awaits_silent_threads`).
        """
        return self.awaits_silent_threads() or self._tiers.is_busy

    def awaits_silent_threads(self) -> bool:
        """Returns True while a thread compiles a grammar or reads an adapter. These threads do not
        wake the engine when they finish."""
        return self._scheduler.awaits_threads()

    def load(self) -> WorkerLoad:
        sequences = self._sequences.values()
        return measure_load(sequences, self._scheduler, self._peer_blocks, self._kv, self._tiers)

    def stats(self) -> EngineStats:
        return measure_stats(
            self._sequences.values(),
            self._kv,
            self._adapters,
            self._tiers,
            self.kept,
            self._speculator.stats,
            self._peer_blocks.stats,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError with a description if blocks or queues are inconsistent."""
        tables = [s.tables for s in self._sequences.values()]
        self._kv.check_integrity([*tables, *self._peer_blocks.tables])
        self._scheduler.check_integrity(self._sequences.values())
        self._tiers.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()

    def close(self) -> None:
        """Ends the threads of the tiers. First, for at most a few seconds, they write copies of the
        blocks that have no copy in a tier yet."""
        self._images.close()
        self._tiers.close()

    def _enter(self, sequence: Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        if sequence.mode is Mode.PREFILL_ONLY or not self._end_if_over(sequence):
            self._scheduler.enqueue(sequence)

    def _end_if_over(
        self, sequence: Sequence, *new_token_ids: int, logprobs: TokenLogprobs | None = None
    ) -> bool:
        """Reports the new tokens of a sequence. If the last token ends the sequence, drops the
        sequence and returns True."""
        reason = finish_reason(sequence.spec, sequence.token_ids, self.max_model_len)
        if reason or new_token_ids:
            self._pending.tokens(sequence, list(new_token_ids), reason, logprobs)
        if reason:
            self._drop(sequence)
        return bool(reason)

    def _settle_loads(self) -> list[Sequence]:
        """Handles the loads from tiers that have ended or that are too slow. Returns the loaded
        sequences whose admission is still to be reported."""
        loaded = []
        for load in self._tiers.take_ended():
            if load.sequence_id in self._peer_blocks:
                self._peer_blocks.take_load(load)
                continue
            sequence = self._sequences[load.sequence_id]
            if not self._scheduler.loads.take(load, sequence):
                self._scheduler.compute_instead(sequence)
                continue
            self._store_full_blocks(sequence)
            # Other requests may wait for these states (early_reuse.py).
            if self._kv.has_states:
                self._freeze_states(sequence)
            self._scheduler.enter(sequence)
            if not load.num_spared:
                loaded.append(sequence)
            elif sequence.mode is Mode.PREFILL_ONLY:
                self._pending.final_blocks(sequence)
        for name in self._scheduler.loads.find_slow(self._scheduler.loading):
            self._scheduler.compute_instead(self._sequences[name], self._tiers.cancel_load(name))
        self._peer_blocks.settle()
        return loaded

    def _settle_adapters(self) -> None:
        errors = self._adapters.settle()
        for sequence in list(self._scheduler.waiting) if errors else ():
            adapter = sequence.spec.adapter
            if adapter is not None and adapter.digest in errors:
                self._fail(sequence, errors[adapter.digest])

    def _settle_images(self) -> None:
        errors = self._images.settle()
        for sequence in list(self._scheduler.running) if errors else ():
            keys = ((sequence.spec.cache_salt, image.digest) for image in sequence.missing_images)
            if found := [key for key in keys if key in errors]:
                self._fail(sequence, errors[found[0]])

    def _settle_masks(self) -> list[GrammarMatcher]:
        """Returns the grammar matchers whose masks are still being computed. The sequences of these
        matchers skip the next step.

        Some sequences may compute their last token only after the mask for the next token is ready
        (`needs_mask_first`). This method starts to compute the masks of these sequences.
        """
        late = []
        for sequence in list(self._scheduler.running):
            grammar = sequence.grammar
            if grammar is None:
                continue
            if sequence.needs_mask_first:
                self._grammars.begin(grammar)
            elif sequence.awaits_mask and (error := grammar.skip()):
                self._fail(sequence, _grammar_error(error))
                continue
            if sequence.awaits_mask:
                late.append(grammar)
        return late

    def _fail(self, sequence: Sequence, error: TandemError) -> None:
        self._pending.failed(sequence, error)
        self._drop(sequence)

    def _run(self, schedule: Schedule, on_final: OnFinal | None) -> None:
        """Computes a step."""

        def on_kv_written() -> None:
            self._count_chunks(schedule.chunks, on_final)

        # To call `on_kv_written` early, the runner waits for the device once more. That is worth it
        # only if a peer waits for the KV.
        is_awaited = any(chunk.sequence.mode is Mode.PREFILL_ONLY for chunk in schedule.chunks)
        sampler = StepSampler(schedule.chunks)
        wait_until = time.perf_counter() + MASK_WAIT_S
        self._grammars.start(sampler.grammars)
        if scratch := [copy for chunk in schedule.chunks for copy in chunk.scratch]:
            self._runner.copy_blocks(scratch)
        only_lines = all(chunk.sequence.spec.is_batch for chunk in schedule.chunks)
        with self._low_priority if only_lines else nullcontext():
            batch = self._batch(schedule)
            logits = self._runner.forward(batch, on_kv_written if is_awaited else None)
        self._grammars.wait(wait_until)
        sampled = self._sample(sampler, logits)
        if not is_awaited:
            on_kv_written()
        if sampler.has_proposals:
            sampled = self._verify(sampled, sampler, logits, schedule)
        self._take(sampled, schedule)
        for chunk in schedule.chunks:
            if chunk.drafts:
                self._kv.trim(chunk.sequence.tables, chunk.sequence.num_tokens)

    def _finish_ahead(self, step: LaunchedStep, on_final: OnFinal | None) -> None:
        """Finishes a step that was launched ahead, without the sequences that have ended since."""
        chunks = [
            chunk
            for chunk in step.schedule.chunks
            if self._sequences.get(chunk.sequence.sequence_id) is chunk.sequence
        ]
        # A sequence to which the grammar has added forced tokens has more tokens to compute first.
        chunks = [
            c if c.sequence.num_missing_tokens == 1 else c._replace(samples=False) for c in chunks
        ]
        drawn = {chunk.sequence for chunk in chunks if chunk.samples}
        sampler = StepSampler.of_ahead(step.schedule.chunks, drawn)
        self._grammars.start(sampler.grammars)
        self._grammars.wait(time.perf_counter() + MASK_WAIT_S)
        sampled = self._sample(sampler, step.logits)
        self._count_chunks(chunks, on_final)
        self._take(sampled, step.schedule)

    def _sample(self, sampler: StepSampler, logits: torch.Tensor) -> list[Sampled]:
        """Samples the tokens of a step, and waits until the step has ended. Before the wait, the
        next step is launched ahead, if that is possible."""
        sampler.skip_late()
        places = sampler.start(self._runner, logits)
        schedule = None
        is_last = not (sampler.needs_logits or sampler.has_proposals)
        if self._runner.launches_ahead and places and is_last:
            schedule = self._scheduler.schedule_ahead(places, self.max_model_len)
        next_logits = None
        if schedule is not None:
            next_logits = self._runner.forward(self._batch(schedule), None)
        sampled = sampler.finish(self._runner, logits)
        # Blocks that are freed from here on may be filled with a peer's KV, so the device must have
        # finished this step. If no token was sampled, nothing has waited for the device yet.
        if not sampled:
            self._runner.synchronize()
        self._kv.free_deferred()
        self._ahead = None
        if schedule is not None and next_logits is not None:
            self._kv.defer_frees()
            self._ahead = LaunchedStep(schedule, next_logits, time.perf_counter())
        return sampled

    def _verify(
        self,
        sampled: Collection[Sampled],
        sampler: StepSampler,
        logits: torch.Tensor,
        schedule: Schedule,
    ) -> list[Sampled]:
        """Compares the sampled tokens of a step with the proposed ones. While they are equal,
        appends them, and samples the next token from the next row of logits. Returns the last
        sampled token of each sequence, which is not appended."""
        ended: list[Sampled] = []
        num_accepted: Counter[Sequence] = Counter()
        while sampled:
            accepted = []
            for one in sampled:
                grammar = one.sequence.grammar
                if (grammar is None or not grammar.error) and sampler.is_proposed(one):
                    if not self._kv.has_states:
                        self._count(one.sequence, 1)
                    one.sequence.append(one.token_id)
                    self._pending.tokens(one.sequence, [one.token_id], "", one.logprobs)
                    accepted.append(one.sequence)
                else:
                    ended.append(one)
            num_accepted.update(accepted)
            sampler.go_on(accepted)
            self._grammars.start(sampler.grammars)
            self._grammars.wait(time.perf_counter() + MASK_WAIT_S)
            sampler.skip_late()
            sampler.start(self._runner, logits)
            sampled = sampler.finish(self._runner, logits)
        sampled_last = {one.sequence for one in ended}
        for chunk in schedule.chunks:
            sequence, drafts = chunk.sequence, chunk.drafts
            if sequence.drafter is None or not drafts:
                continue
            self._speculator.count(
                sequence.drafter,
                num_accepted[sequence],
                len(drafts),
                schedule.work.draft_tokens,
            )
            if num_accepted[sequence] == len(drafts) and sequence in sampled_last:
                self._kv.keep_scratch(sequence.tables, chunk.scratch)
                if chunk.scratch:
                    self._count(sequence, sequence.num_missing_tokens)
            else:
                self._kv.return_scratch(chunk.scratch)
        return ended

    def _batch(self, schedule: Schedule) -> StepBatch:
        if self._kv.has_working_states:
            running = [each for each in self._scheduler.running if each.has_run]
            live_slots = [
                frozenset(each.tables.ids[group][0] for each in running)
                for group in self._kv.layout.state_groups
            ]
            return replace(schedule.batch, live_slots=live_slots)
        if self._runner.shards_logits:
            return replace(schedule.batch, top_k=schedule.top_k)
        return schedule.batch

    def _count_chunks(self, chunks: Iterable[Chunk], on_final: OnFinal | None) -> None:
        """Counts the tokens of chunks as computed, except tokens that `_take` counts."""
        for chunk in chunks:
            self._scheduler.computed(chunk)
            # If the grammar's mask is late, no token is sampled, and the last token is computed
            # again in a later step. So the last token is not counted before sampling. Neither is
            # that of a chunk with proposed tokens: each sampled token counts the one before it.
            is_open = chunk.samples and chunk.sequence.grammar is not None
            self._count(chunk.sequence, chunk.num_tokens - (is_open or bool(chunk.drafts)))
        self._pending.report_final(on_final)

    def _take(self, sampled: Collection[Sampled], schedule: Schedule) -> None:
        """Appends the sampled tokens to their sequences."""
        # The running states of these have not taken in the step's tokens, which are computed again.
        others = {chunk.sequence for chunk in schedule.chunks if chunk.scratch}
        for sequence, _, _ in sampled:
            if sequence.num_missing_tokens and sequence not in others:
                self._count(sequence, 1)
        schedule.evict()
        for sequence, token_id, logprobs in sampled:
            self._advance(sequence, token_id, logprobs)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that the KV of `num_tokens` more tokens is in the pool, and caches the blocks
        that are full now.

        Caching may replace a block by an equal cached block. So a block is cached before its id is
        reported to the peer.
        """
        sequence.advance(num_tokens)
        self._store_full_blocks(sequence)
        if num_tokens and sequence.is_at_checkpoint:
            self._freeze_states(sequence)
        is_final = sequence.mode is Mode.PREFILL_ONLY and not sequence.num_missing_tokens
        if is_final and self._kv.has_working_states:
            running = {group: sequence.tables.ids[group][0] for group in sequence.tables.states}
            self._runner.store_states([(slot, slot, group) for group, slot in running.items()])
        if sequence.mode is Mode.PREFILL_ONLY:
            self._pending.final_blocks(sequence)

    def _advance(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Appends a sampled token to its sequence, or reports it if a peer will decode."""
        if token_id == NO_TOKEN:
            self._fail(
                sequence,
                InternalError(
                    "the model computed a NaN or an infinity in place of the logits of token "
                    f"{sequence.num_tokens} of this request"
                ),
            )
        elif sequence.grammar is not None and sequence.grammar.error:
            self._fail(sequence, _grammar_error(sequence.grammar.error))
        elif sequence.mode is Mode.PREFILL_ONLY:
            self._scheduler.withdraw(sequence)
            sequence.status = Status.HELD
            self._pending.prefilled(sequence, token_id, logprobs)
        else:
            new = sequence.append_drawn(token_id, self.max_model_len, self._config.forced_max)
            self._end_if_over(sequence, *new, logprobs=logprobs)

    def _store_full_blocks(self, sequence: Sequence) -> None:
        sequence.store_full_blocks(self._kv)
        if sequence.num_used_blocks < sequence.num_stored_blocks:
            self._scheduler.loads.use(sequence)

    def _freeze_states(self, sequence: Sequence) -> None:
        """Caches copies of the running states of a sequence, so that requests can resume here."""
        if copies := sequence.freeze_states(self._kv):
            copy = self._runner.store_states if sequence.has_run else self._runner.copy_blocks
            copy(copies)
            # A slot may be freed and filled by a pull, so the copies must have ended.
            self._runner.synchronize()

    def _drop(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """Removes a sequence from the engine and frees its blocks. No other function does this."""
        unsafe_blocks = [*unsafe_blocks, *self._tiers.cancel_load(sequence.sequence_id)]
        own = self._kv.global_ids(sequence.tables, sequence.num_stored_blocks)
        check_own(sequence.sequence_id, own, unsafe_blocks)
        del self._sequences[sequence.sequence_id]
        if sequence.grammar is not None:
            sequence.grammar.cancel()
        stored = sequence.block_hashes[: sequence.num_stored_blocks]
        spec = sequence.spec
        self.kept.keep(spec.cache_salt, spec.retention, stored)
        if sequence.drafter is not None:
            self._speculator.keep(spec, sequence.token_ids)
        if self._draft_model is not None:
            self._draft_model.release(sequence)
        self._scheduler.withdraw(sequence)
        self._kv.release(sequence.release_tables(), unsafe_blocks)

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id in self._sequences or sequence_id in self._peer_blocks:
            raise InternalError(f"sequence {sequence_id} is already on this engine")

    def _check_chain(self, sequence_id: str) -> None:
        self._check_new(sequence_id)
        self._check_queue(len(self._peer_blocks))

    def _check_queue(self, num_queued: int) -> None:
        if num_queued >= self._config.queue_max:
            raise QueueFull(
                f"{num_queued} requests already wait at this worker, which is the limit "
                "(--queue-max); try again later",
                retry_after_s=1.0,
            )

    def _take_report(self, work: StepWork, started: float) -> StepReport:
        seconds = time.perf_counter() - started
        report = self._pending.take(work, seconds)
        report.step = next(self._steps)
        report.load = self.load()
        report.stats = self.stats()
        report.stored, report.removed = self._kv.take_events()
        report.chains = self._kv.take_chain_changes()
        report.tiers = self._tiers.take_events()
        if work.num_tokens:
            drafting_s = 0.0 if self._draft_model is None else self._draft_model.take_seconds()
            self._step_time.observe(work, seconds - drafting_s)
            report.rates = self._step_time.rates(self.unmeasured_rates)
        return report


def _grammar_error(why: str) -> BadRequest:
    return BadRequest(f"the grammar of the request failed during decoding: {why}")


class LiveSequences(dict[str, Sequence]):
    """The sequences of one engine by id."""

    def find(self, sequence_id: str) -> Sequence:
        """Returns the sequence with this id. Raises InternalError if there is none."""
        if sequence_id not in self:
            raise InternalError(f"there is no sequence {sequence_id} on this engine")
        return self[sequence_id]

    def awaiting(self, sequence_id: str) -> Sequence:
        """Returns the sequence if it awaits KV from a peer. Otherwise raises InternalError."""
        sequence = self.find(sequence_id)
        if sequence.status is not Status.WAITING_FOR_KV:
            raise InternalError(
                f"the status of sequence {sequence_id} is {sequence.status.value}; it must be "
                f"{Status.WAITING_FOR_KV.value}"
            )
        return sequence

    def awaiting_all(self, sequence_id: str) -> Sequence:
        """Returns the sequence if it awaits the KV of its whole prompt from a peer. Otherwise
        raises InternalError."""
        sequence = self.awaiting(sequence_id)
        if sequence.mode is not Mode.WAITING_FOR_REMOTE_KV:
            raise InternalError(
                f"sequence {sequence_id} waits for the KV of a prefix, not of the whole prompt"
            )
        return sequence
