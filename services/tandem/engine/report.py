"""Collects the events of an engine for its next report."""

import time

import msgspec

from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.perf_model.step_time import StepWork
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.transfer_order import running_states, transfer_order
from tandem.engine.sequence import Sequence, Status
from tandem.engine.types import (
    Admitted,
    Failed,
    FinalBlocks,
    Held,
    Mode,
    NewTokens,
    OnFinal,
    Prefilled,
    Reserved,
    StepReport,
    TokenLogprobs,
)
from tandem.errors import TandemError

# A line of a batch reports this many tokens together. Nobody reads them before the line ends, and
# each report costs every process up to the router some work.
_LINE_TOKENS = 32


class PendingReport:
    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._report = StepReport()
        # sequence id of a line of a batch -> its tokens that no report has
        self._held: dict[str, NewTokens] = {}

    @property
    def has_events(self) -> bool:
        """True if an event must be reported now, even if the engine has no token to compute."""
        report = self._report
        ended = bool(report.new_tokens or report.prefilled or report.held or report.failed)
        return self.starts_a_transfer or ended

    @property
    def starts_a_transfer(self) -> bool:
        return bool(self._report.reserved or self._report.final_blocks)

    def admitted(self, sequence: Sequence) -> None:
        self._report.admitted.append(
            Admitted(
                sequence.sequence_id,
                time.monotonic(),
                sequence.shared_wait_s,
                sequence.tokens_ahead,
            )
        )
        awaits = sequence.status is Status.WAITING_FOR_KV
        if awaits:
            # With sliding windows, a sequence that awaits its prefix has only the blocks of the
            # prefix. Without windows, it has the blocks for all of its tokens, and `prefix` is 0.
            prefix = sequence.num_prefix_blocks * self._layout.has_windows
            is_prefix = sequence.mode is not Mode.WAITING_FOR_REMOTE_KV
            self.reserved(
                sequence.sequence_id,
                sequence.tables,
                num_cached=sequence.num_stored_blocks,
                num_blocks=prefix or sequence.tables.num_full(sequence.num_tokens),
                depth=prefix or sequence.last_depth,
                cached=sequence.cached or NONE_CACHED,
                checkpoint=0 if is_prefix else sequence.tables.checkpoint,
            )
        # With sliding windows, a sequence that awaits its prefix may have to release its blocks and
        # start again. So the blocks that it reuses are not final yet.
        if sequence.mode is Mode.PREFILL_ONLY and not (awaits and self._layout.has_windows):
            self.final_blocks(sequence)

    def reserved(
        self,
        sequence_id: str,
        tables: BlockTables,
        *,
        num_cached: int,
        num_blocks: int,
        depth: int,
        cached: CachedTokens = NONE_CACHED,
        checkpoint: int = 0,
    ) -> None:
        """Reports the blocks with index `num_cached` to `num_blocks` - 1, which a pull from a peer
        has to fill. The blocks before them are cached.

        The sequence resumes after `depth` blocks. The frozen states after `checkpoint` blocks are
        pulled, too, if this is not 0.
        """
        missing = transfer_order(
            self._layout, tables, num_cached, num_blocks, depth=depth, checkpoint=checkpoint
        )
        missing = missing + running_states(self._layout, tables)
        num_cached_tokens = num_cached * self._layout.block_size
        self._report.reserved.append(Reserved(sequence_id, num_cached_tokens, missing, cached))

    def held(
        self, sequence_id: str, tables: BlockTables, num_blocks: int, first_wanted_block: int
    ) -> None:
        """Reports that a chain of `num_blocks` blocks is held for a peer, and the ids of the blocks
        from index `first_wanted_block` on."""
        wanted = transfer_order(
            self._layout, tables, first_wanted_block, num_blocks, depth=num_blocks
        )
        if wanted:
            self._report.final_blocks.append(FinalBlocks(sequence_id, first_wanted_block, wanted))
        self._report.held.append(Held(sequence_id, num_blocks))

    def final_blocks(self, sequence: Sequence) -> None:
        """Reports the blocks of a PREFILL_ONLY sequence that became final, except blocks that the
        consumer does not want."""
        first = sequence.num_reported_blocks
        end = sequence.num_final_blocks
        if end <= first:
            return
        block_ids = transfer_order(
            self._layout,
            sequence.tables,
            first,
            end,
            depth=sequence.last_depth,
            checkpoint=sequence.tables.checkpoint,
        )
        if not sequence.num_missing_tokens:
            block_ids = block_ids + running_states(self._layout, sequence.tables)
        sequence.num_reported_blocks = end
        if block_ids:
            number = sequence.next_in_transfer
            sequence.next_in_transfer += len(block_ids)
            self._report.final_blocks.append(FinalBlocks(sequence.sequence_id, number, block_ids))

    def report_final(self, on_final: OnFinal | None) -> None:
        """Passes the blocks that became final to `on_final` now, instead of with the report."""
        final_blocks = self._report.final_blocks
        if on_final is not None and final_blocks:
            self._report.final_blocks = []
            on_final(final_blocks)

    def prefilled(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> None:
        self.final_blocks(sequence)
        self._report.prefilled.append(
            Prefilled(
                sequence.sequence_id,
                token_id,
                sequence.cached or NONE_CACHED,
                logprobs,
                sequence.prompt_logprobs,
                sequence.embedding,
                sequence.tables.block_sums(sequence.num_computed_tokens),
            )
        )

    def tokens(
        self,
        sequence: Sequence,
        token_ids: list[int],
        finish_reason: str,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Reports new tokens. If `logprobs` is given, `token_ids` has one token, which `logprobs`
        describes. The prompt's log probabilities and embedding go with the first token.

        A line of a batch reports its first two tokens at once, because their times are measured,
        and the others together.
        """
        new = NewTokens(
            sequence_id=sequence.sequence_id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            cached=sequence.cached or NONE_CACHED,
            num_preemptions=sequence.num_preemptions,
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=sequence.prompt_logprobs,
            embedding=sequence.embedding,
            speculated=None if sequence.drafter is None else sequence.drafter.result,
        )
        sequence.prompt_logprobs = []
        sequence.embedding = []
        if sequence.spec.is_batch:
            if (held := self._held.pop(sequence.sequence_id, None)) is not None:
                new = _join(held, new)
            is_early = len(sequence.token_ids) <= len(sequence.spec.token_ids) + 2
            if not (is_early or finish_reason or len(new.token_ids) >= _LINE_TOKENS):
                self._held[sequence.sequence_id] = new
                return
        self._report.new_tokens.append(new)

    def failed(self, sequence: Sequence, error: TandemError) -> None:
        """Reports that the sequence failed with an error."""
        if (held := self._held.pop(sequence.sequence_id, None)) is not None:
            self._report.new_tokens.append(held)
        failed = Failed(sequence.sequence_id, error.code, error.message, error.retry_after_s or 0.0)
        self._report.failed.append(failed)

    def forget(self, sequence_id: str) -> None:
        """Drops all unreported events of a sequence."""
        self._held.pop(sequence_id, None)
        report = self._report
        report.new_tokens = [new for new in report.new_tokens if new.sequence_id != sequence_id]
        report.admitted = [a for a in report.admitted if a.sequence_id != sequence_id]
        report.reserved = [r for r in report.reserved if r.sequence_id != sequence_id]
        report.final_blocks = [f for f in report.final_blocks if f.sequence_id != sequence_id]
        report.held = [held for held in report.held if held.sequence_id != sequence_id]

    def take(self, work: StepWork, seconds: float) -> StepReport:
        """Returns the collected events as the report of a step, and starts an empty report. The
        step computed the tokens in `work` and took `seconds`."""
        report, self._report = self._report, StepReport()
        report.new_tokens = _joined(report.new_tokens)
        report.step_ms = seconds * 1000
        report.num_prefill_tokens = work.prefill_tokens
        report.num_prefill_context_tokens = work.prefill_contexts
        report.num_decode_tokens = work.decode_tokens
        report.num_decode_context_tokens = work.decode_contexts
        return report


def _joined(new_tokens: list[NewTokens]) -> list[NewTokens]:
    """Joins the items of each sequence to one. Speculation may yield several in one step."""
    by_id: dict[str, NewTokens] = {}
    for new in new_tokens:
        if (first := by_id.get(new.sequence_id)) is not None:
            new = _join(first, new)
        by_id[new.sequence_id] = new
    return new_tokens if len(by_id) == len(new_tokens) else list(by_id.values())


def _join(first: NewTokens, then: NewTokens) -> NewTokens:
    return msgspec.structs.replace(
        first,
        token_ids=[*first.token_ids, *then.token_ids],
        finish_reason=then.finish_reason,
        num_preemptions=then.num_preemptions,
        logprobs=[*first.logprobs, *then.logprobs],
        speculated=then.speculated,
    )
