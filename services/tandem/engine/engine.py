"""One model, its KV pool and its sequences, moved on by `step`: schedule, run, postprocess.

Synchronous; knows no network, no asyncio, no Redis and no Ray. Everything that happens, also
between steps, comes out in the next `StepReport`. `has_work` says whether a step would do
anything; while it is False only a call from outside (add, commit, remove, ...) changes that.
The states of a sequence are in sequence.py, those of a block in block_pool.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import torch

from tandem.block_hash import chain_root
from tandem.config import EngineConfig
from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.cache.block_table import check_own, check_trusted, give_back, store_blocks
from tandem.engine.cache.layout import num_blocks_of
from tandem.engine.chains import Chains
from tandem.engine.executor.sampler import sample_next
from tandem.engine.load import measure_load
from tandem.engine.report import PendingReport
from tandem.engine.runner_protocol import Runner
from tandem.engine.scheduler.admission import check_spec
from tandem.engine.scheduler.pace import Pace
from tandem.engine.scheduler.scheduler import Chunk, Schedule, Scheduler
from tandem.engine.scheduler.seats import STEP_SHARE, Seats
from tandem.engine.sequence import Sequence, Status
from tandem.engine.types import EngineLoad, FinalBlocks, Mode, SequenceSpec, StepReport
from tandem.errors import InternalError, QueueFull, TandemError


class Engine:
    def __init__(self, config: EngineConfig, runner: Runner, model_fingerprint: str) -> None:
        """Allocates the KV pool. Raises ConfigError when not even one block fits."""
        self.layout = runner.layout(num_blocks_of(config, runner.layout(1).block_bytes))
        self.max_model_len = runner.max_model_len
        self.max_tokens_per_step = config.max_tokens_per_step or runner.tokens_per_step
        runner.allocate(self.layout.num_blocks)
        self._runner = runner
        self._config = config
        self._model_fingerprint = model_fingerprint
        self._pool = BlockPool(self.layout.num_blocks)
        limits_s = [s for s in (config.itl_target_s, STEP_SHARE * config.itl_limit_s) if s]
        self._pace = Pace(min(limits_s, default=0.0))
        # Each decodes a token in every step, and one is left for a prompt.
        max_num_seqs = min(config.max_num_seqs, max(1, self.max_tokens_per_step - 1))
        self._seats = Seats(self._pace, max_num_seqs=max_num_seqs, itl_limit_s=config.itl_limit_s)
        self._scheduler = Scheduler(
            self._pool,
            self._pace,
            self._seats,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=self.max_tokens_per_step,
            bytes_per_token=self.layout.block_bytes / self.layout.block_size,
        )
        self._sequences: dict[str, Sequence] = {}
        self._chains = Chains(self._pool)
        self._pending = PendingReport()
        self._num_arrivals = 0
        self._num_steps = 0

    def step(self, on_final: Callable[[list[FinalBlocks]], object] | None = None) -> StepReport:
        """Runs the model once and answers all that happened since the step before.

        Blocks that readers wait for go to `on_final` as soon as they are final, while the step is
        still on its way to the tokens; without it they are in the report.
        """
        started = time.perf_counter()
        schedule = self._scheduler.schedule()
        for sequence in schedule.admitted:
            self._pending.admitted(sequence)
        self._pending.tell_final(on_final)
        # Peers wait for what admission found out: tell them first, compute in the next step.
        if schedule.chunks and not self._pending.starts_a_transfer:
            self._run(schedule, on_final)
        return self._take_report(started)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence. Raises BadRequest, ContextTooLong, NeverFits or QueueFull.

        One that is over already (a moved one, whose last token ended it) is reported as such.
        """
        self._check_new(spec.sequence_id)
        self._check_spec(spec)
        self._check_queue(len(self._scheduler.waiting))
        self._num_arrivals += 1
        self._enter(self._new_sequence(spec, self._num_arrivals))

    def _check_spec(self, spec: SequenceSpec) -> None:
        check_spec(
            spec,
            layout=self.layout,
            max_model_len=self.max_model_len,
            vocab_size=self._runner.vocab_size,
        )

    def start_local_prefill(self, sequence_id: str) -> None:
        """An AWAIT_KV sequence, none of whose blocks was filled, is computed here after all."""
        self._scheduler.start(self._awaiting_all(sequence_id))

    def restart(self, spec: SequenceSpec, unsafe_blocks: Collection[int] = ()) -> None:
        """Gives up pulled KV: the sequence waits again with `spec`, by its age at the queue's head.

        `unsafe_blocks` are its blocks that a read may still write; they are quarantined. Raises as
        `add` does, except QueueFull; the sequence is gone then.
        """
        old = self._find(spec.sequence_id)
        if Mode.FOR_PEER in (old.mode, spec.mode):
            raise InternalError(f"sequence {spec.sequence_id} is for a peer and cannot restart")
        self._drop(old, unsafe_blocks)
        self._check_spec(spec)
        new = self._new_sequence(spec, old.arrival)
        new.num_cached_tokens = old.num_cached_tokens
        new.num_preemptions = old.num_preemptions
        self._enter(new)

    def commit(self, sequence_id: str, first_token_id: int) -> None:
        """All KV of an AWAIT_KV sequence is in place and trusted: it joins the decode batch.

        The first token is with the client already: it is not reported again, only an end that it
        may bring.
        """
        sequence = self._awaiting_all(sequence_id)
        sequence.num_computed_tokens = sequence.num_tokens
        self._store_full_blocks(sequence)
        sequence.append(first_token_id)
        if reason := sequence.finish_reason(self.max_model_len):
            self._pending.tokens(sequence, [], reason)
            self._drop(sequence)
        else:
            self._scheduler.start(sequence)

    def continue_prefill(
        self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int] = ()
    ) -> None:
        """The first `num_blocks` blocks of a sequence that awaits its prefix are in place and
        trusted; the rest is computed here. With the cached ones only, nothing came.

        `unsafe_blocks` are own blocks after them that a read may still write; they are quarantined,
        and others take their place. Raises QueueFull when there are none, and InternalError for
        blocks that cannot be trusted; the sequence is gone then.
        """
        sequence = self._awaiting(sequence_id)
        if sequence.mode is Mode.AWAIT_KV:
            raise InternalError(f"sequence {sequence_id} awaits all its KV, not a prefix")
        try:
            check_trusted(
                sequence_id,
                sequence.block_table,
                unsafe_blocks,
                num_stored_blocks=sequence.num_stored_blocks,
                num_blocks=num_blocks,
            )
            unsafe = set(unsafe_blocks)
            fresh = self._pool.allocate(len(unsafe))
            if fresh is None:
                raise QueueFull("no blocks are left in place of some that a read may still write")
        except TandemError:
            self._drop(sequence, unsafe_blocks)
            raise
        others = dict(zip(unsafe, fresh, strict=True))
        self._pool.quarantine(unsafe)
        sequence.block_table = [others.get(b, b) for b in sequence.block_table]
        # At least the last token is computed, whatever came.
        sequence.take_prefix(min(num_blocks, len(sequence.reusable_hashes)))
        self._store_full_blocks(sequence)
        if sequence.mode is Mode.FOR_PEER:
            self._pending.final_blocks(sequence)
        self._scheduler.start(sequence)

    def hold(
        self, sequence_id: str, block_hashes: list[bytes], first_wanted_block: int = 0
    ) -> None:
        """Keeps what is cached of a chain for a reader until `remove`: reported at once."""
        self._check_new(sequence_id)
        self._check_queue(len(self._chains))
        chain = self._chains.hold(sequence_id, block_hashes)
        self._pending.held(sequence_id, chain.block_table, first_wanted_block)

    def adopt(self, sequence_id: str, block_hashes: list[bytes]) -> None:
        """Takes blocks for a chain that comes from outside, until `commit_adopted` or `remove`.

        Evicts nothing: the chain is cut short where no FREE block is left.
        """
        self._check_new(sequence_id)
        self._check_queue(len(self._chains))
        chain = self._chains.adopt(sequence_id, block_hashes)
        num_cached = chain.num_cached_blocks
        missing = chain.block_table[num_cached:]
        self._pending.reserved(sequence_id, num_cached * self.layout.block_size, missing)

    def commit_adopted(
        self, sequence_id: str, num_blocks: int, unsafe_blocks: Collection[int] = ()
    ) -> None:
        """The first `num_blocks` blocks of an adopted chain are in place and trusted: they are
        cached from now on, and the chain is gone."""
        self._chains.commit(sequence_id, num_blocks, unsafe_blocks)
        self._pending.forget(sequence_id)

    def hot_chains(self, blocks_max: int) -> list[list[bytes]]:
        """Hashes of the chains used last, root to leaf; `blocks_max` different blocks at most."""
        return self._pool.hot_chains(blocks_max)

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Hashes held here from `first` on and before `end`; empty `end`: to the last."""
        return self._pool.block_hashes(first, end)

    def remove(self, sequence_id: str, unsafe_blocks: Collection[int] = ()) -> None:
        """Ends a sequence or chain in any state and frees its blocks; an unknown one is no error.

        It is not heard of again, also when it just ended and that was not reported yet.
        """
        if sequence_id in self._sequences:
            self._drop(self._sequences[sequence_id], unsafe_blocks)
        elif sequence_id in self._chains:
            self._chains.remove(sequence_id, unsafe_blocks)
        self._pending.forget(sequence_id)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """No read writes these blocks any more."""
        self._pool.unquarantine(block_ids)

    def block_ids(self, sequence_id: str) -> list[int]:
        """The block table of a sequence or chain; while KV is awaited it stays as it is."""
        if sequence_id in self._chains:
            return self._chains.block_ids(sequence_id)
        return list(self._find(sequence_id).block_table)

    def has_work(self) -> bool:
        return self._pending.has_news or self._pool.has_events or self._scheduler.has_work()

    def load(self) -> EngineLoad:
        return measure_load(
            self._sequences.values(),
            self._chains,
            self._pool,
            num_seats=self._seats.num,
            chunk_tokens=self._scheduler.chunk_tokens,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong with the blocks or the queues."""
        sequences = self._sequences.values()
        tables = [s.block_table for s in sequences]
        self._pool.check_integrity([*tables, *self._chains.block_tables])
        self._scheduler.check_integrity(sequences)

    def _enter(self, sequence: Sequence) -> None:
        self._sequences[sequence.sequence_id] = sequence
        reason = sequence.finish_reason(self.max_model_len)
        if reason and sequence.mode is not Mode.FOR_PEER:
            self._pending.tokens(sequence, [], reason)
            self._drop(sequence)
        else:
            self._scheduler.enqueue(sequence)

    def _run(
        self, schedule: Schedule, on_final: Callable[[list[FinalBlocks]], object] | None
    ) -> None:
        def on_kv_written() -> None:
            for chunk in schedule.chunks:
                self._count(chunk)
            self._pending.tell_final(on_final)

        # Only a peer is told of KV before the step ends; else the device is waited for just once.
        is_awaited = any(chunk.sequence.mode is Mode.FOR_PEER for chunk in schedule.chunks)
        logits = self._runner.forward(schedule.batch, on_kv_written if is_awaited else None)
        sampling = [chunk.sequence for chunk in schedule.chunks if chunk.samples]
        tokens = sample_next(logits, sampling, self._runner.sample) if sampling else []
        # What is freed now may be written by a peer's bytes: nothing may read it any more. Tokens
        # came after all else in the stream.
        if logits.is_cuda and not tokens:
            torch.cuda.current_stream(logits.device).synchronize()
        if not is_awaited:
            on_kv_written()
        for sequence, token_id in zip(sampling, tokens, strict=True):
            self._advance(sequence, token_id)

    def _count(self, chunk: Chunk) -> None:
        """The chunk's KV is in place. A block is stored before a reader hears of it: after that it
        is never swapped for a twin."""
        sequence = chunk.sequence
        self._pending.computed(sequence, chunk.num_tokens)
        self._scheduler.computed(chunk)
        sequence.num_computed_tokens += chunk.num_tokens
        self._store_full_blocks(sequence)
        if sequence.mode is Mode.FOR_PEER:
            self._pending.final_blocks(sequence)

    def _advance(self, sequence: Sequence, token_id: int) -> None:
        """Nothing is missing of the sequence, and `token_id` was sampled."""
        if sequence.mode is Mode.FOR_PEER:
            self._scheduler.withdraw(sequence)
            sequence.status = Status.HELD
            self._pending.prefilled(sequence, token_id)
        else:
            sequence.append(token_id)
            reason = sequence.finish_reason(self.max_model_len)
            self._pending.tokens(sequence, [token_id], reason)
            if reason:
                self._drop(sequence)

    def _store_full_blocks(self, sequence: Sequence) -> None:
        """Lets others find what became full. A block that is there already takes its place."""
        num_full_blocks = sequence.num_computed_tokens // self.layout.block_size
        store_blocks(
            self._pool,
            sequence.block_table,
            sequence.block_hashes,
            chain_root=sequence.chain_root,
            first=sequence.num_stored_blocks,
            last=num_full_blocks,
        )
        sequence.num_stored_blocks = max(sequence.num_stored_blocks, num_full_blocks)

    def _drop(self, sequence: Sequence, unsafe_blocks: Collection[int] = ()) -> None:
        """The one place where a sequence leaves the engine and its blocks are freed."""
        own = sequence.block_table[sequence.num_stored_blocks :]
        check_own(sequence.sequence_id, own, unsafe_blocks)
        del self._sequences[sequence.sequence_id]
        self._scheduler.withdraw(sequence)
        give_back(self._pool, sequence.let_go(), unsafe_blocks)

    def _new_sequence(self, spec: SequenceSpec, arrival: int) -> Sequence:
        root = chain_root(
            model_fingerprint=self._model_fingerprint,
            compute_dtype=self._runner.dtype_name,
            numerics=self._runner.numerics_name,
            kv_dtype=self._runner.kv_dtype_name,
            block_size=self.layout.block_size,
            cache_salt=spec.cache_salt,
        )
        return Sequence.from_spec(
            spec, arrival=arrival, block_size=self.layout.block_size, chain_root=root
        )

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id in self._sequences or sequence_id in self._chains:
            raise InternalError(f"sequence {sequence_id} is on this engine already")

    def _check_queue(self, num_queued: int) -> None:
        if num_queued >= self._config.queue_max:
            raise QueueFull(
                f"{num_queued} requests wait already; the queue holds {self._config.queue_max}",
                retry_after_s=1.0,
            )

    def _find(self, sequence_id: str) -> Sequence:
        if sequence_id not in self._sequences:
            raise InternalError(f"no sequence {sequence_id} is on this engine")
        return self._sequences[sequence_id]

    def _awaiting(self, sequence_id: str) -> Sequence:
        sequence = self._find(sequence_id)
        if sequence.status is not Status.AWAITING_KV:
            raise InternalError(f"sequence {sequence_id} is {sequence.status.value}, not awaiting")
        return sequence

    def _awaiting_all(self, sequence_id: str) -> Sequence:
        sequence = self._awaiting(sequence_id)
        if sequence.mode is not Mode.AWAIT_KV:
            raise InternalError(f"sequence {sequence_id} awaits its prefix, not all its KV")
        return sequence

    def _take_report(self, started: float) -> StepReport:
        report = self._pending.take()
        self._num_steps += 1
        report.step = self._num_steps
        report.stored, report.removed = self._pool.take_events()
        report.load = self.load()
        report.step_ms = (time.perf_counter() - started) * 1000
        self._pace.observe(report)
        return report
