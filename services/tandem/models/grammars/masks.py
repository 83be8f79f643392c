"""Tracks the completions that have a grammar, and computes the mask of each next token.

Two kinds of threads do the work:
- Compile threads compile grammar texts. Compiled grammars are cached. The engine admits a sequence
  when the sequence's grammar is compiled.
- Mask threads work while the model computes a step. A mask thread passes the tokens of the last
  step to the matcher of a sequence, then computes the sequence's mask: one bit for each token of
  the vocabulary.

A step waits at most `MASK_WAIT_S` for the masks of its sequences. A sequence whose mask is late
skips the step and samples no token. In the first step for which the mask is ready, the model
computes the sequence's last token again, and the next token is sampled. A late mask
therefore delays a sequence but does not change the sampled tokens. A sequence ends with an error if
it skips more than `SKIPS_MAX` steps while one mask is computed. If the last mask of a sequence was
slow, the next mask is computed before the sequence joins a step, so other sequences do not wait.

Slow work must not delay fast work. There are therefore three mask threads: one for sequences with
fast masks, one for new sequences and one for sequences with slow masks. There are two compile
threads: one for short and one for long grammars. If a mask thread needs too long for one mask, a
new thread takes over the other masks. All matchers of a grammar share one lexer, which a lock
protects.

Where the grammar allows only one text, the tokens of the text's usual tokenization are forced, and
no other tokenization is allowed. The engine may append forced tokens without a model step.

All threads run without the GIL most of the time. A matcher fails if its work exceeds llguidance's
limits or a token is not allowed. A failed matcher stays failed, and the engine ends its sequence.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tandem.errors import BadRequest, TandemError
from tandem.models.grammars.compiler import GrammarCompiler

log = logging.getLogger(__name__)

GRAMMARS_MAX = 32  # maximum number of cached grammars; each takes at most 40 MB, usually far less
GRAMMAR_BYTES_MAX = 1 << 20  # maximum sum of the sizes of the cached grammars' texts
# Grammar texts with more bytes than this are compiled by a second thread, because they may take
# seconds.
LONG_TEXT_BYTES = 16 << 10
MASK_WAIT_S = 0.02  # longest time that a step waits for masks, counted from the start of the step
SLOW_MASK_S = 0.002  # CPU seconds; a mask that takes longer is slow. Usual masks take 0.0001 s.
# Maximum time in each step that the engine's thread spends on the search for forced tokens.
FORCED_SEARCH_S = 0.005
SKIPS_MAX = 10
# Of the steps that a sequence skips, at most one is counted in each period of this length. Example:
# a sequence that waits 100 ms for a mask skips 20 steps of 5 ms, of which only 2 count. Without
# this rule it would exceed SKIPS_MAX.
SKIP_S = 0.05

Mask = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Compiled:
    matcher: Future[LLMatcher]  # matcher in the grammar's initial state, which sequences copy
    # Held while a thread uses the lexer, which all matchers of the grammar share.
    lock: threading.Lock = field(default_factory=threading.Lock)
    # True: a matcher failed, so the shared lexer may be invalid. The grammar is compiled again for
    # the next sequence.
    is_broken: bool = False


class GrammarMatcher:
    """Tracks how far one completion has advanced in its grammar, and has the mask of the next
    token. `mask` is valid until the next `append`."""

    def __init__(
        self,
        masks: GrammarMasks,
        compiler: GrammarCompiler,
        compiled: _Compiled,
        token_ids: list[int],
    ) -> None:
        """`token_ids` are the completion's tokens so far."""
        self._masks = masks
        self._compiler = compiler
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._token_ids = list(token_ids)
        # Number of bits of a mask: one for each logit. llguidance's vocabulary may be larger.
        self._vocab_size = masks.vocab_size
        self.mask: Mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        # The only token that `mask` allows, if the grammar forces a token.
        self.forced: int | None = None
        self.error = ""
        # The job that computes the next mask, running or finished. None: it was not started yet.
        self.update_job: Future[None] | None = None
        self.is_started = False  # True: `update_job` has begun to compute, or has finished.
        self.num_skipped = 0  # number of counted steps that were skipped while `update_job` ran
        self._counted_until = 0.0  # A step that is skipped before this time is not counted.
        self.cost_s: float | None = None  # CPU seconds that the last mask took

    @property
    def is_compiled(self) -> bool:
        """True when the compilation has succeeded or failed."""
        return self._compiled.matcher.done()

    @property
    def is_slow(self) -> bool:
        """True if the last mask was slow. The next mask is then computed before the sequence joins
        a step."""
        return self.cost_s is not None and self.cost_s > SLOW_MASK_S

    @property
    def is_late(self) -> bool:
        """True while the mask of the next token is still being computed."""
        return self.update_job is not None and not self.update_job.done()

    def append(self, token_id: int) -> None:
        """Adds the newest token of the completion. The next `update` passes the token to the
        matcher."""
        self._token_ids.append(token_id)
        self.update_job = None
        self.is_started = False
        self.num_skipped = 0

    def cancel(self) -> None:
        """Cancels the pending mask, because the sequence has ended."""
        if self.update_job is not None:
            self.update_job.cancel()

    def skip(self) -> str:
        """Counts a skipped step. If the sequence must end because it has skipped too many steps,
        returns the reason, otherwise ""."""
        now = time.perf_counter()
        if self.is_started and now >= self._counted_until:
            self.num_skipped += 1
            self._counted_until = now + SKIP_S
        if self.num_skipped <= SKIPS_MAX:
            return ""
        return f"computing which tokens are allowed next took longer than {SKIPS_MAX} steps"

    def find_forced(self) -> int | None:
        """Returns the next token if the grammar forces one. Returns None if the grammar allows
        several tokens, or if the search might delay the engine."""
        # If the lock is taken, the search is omitted. A mask thread that uses the same grammar may
        # hold the lock for long.
        if self.is_slow or not self._masks.may_search or not self._compiled.lock.acquire(False):
            return None
        started = time.perf_counter()
        try:
            return self._find_forced()
        finally:
            self._compiled.lock.release()
            self._masks.search_s += time.perf_counter() - started

    def count_allowed(self, token_ids: list[int]) -> int:
        """Returns how many of these next tokens the grammar allows, from the first on. Returns 0 if
        the check might delay the engine."""
        if self.is_slow or not self._masks.may_search or not self._compiled.lock.acquire(False):
            return 0
        started = time.perf_counter()
        try:
            matcher = self._catch_up()
            return 0 if matcher is None else matcher.validate_tokens(token_ids)
        finally:
            self._compiled.lock.release()
            self._masks.search_s += time.perf_counter() - started

    def update(self) -> None:
        """Computes the mask of the next token, or sets `error`. Runs on a mask thread."""
        with self._compiled.lock:
            self.is_started = True
            started = time.thread_time()
            try:
                self._update()
            except BaseException as error:  # llguidance's panics do not derive from Exception.
                log.exception("the token mask of a grammar could not be computed")
                self.error = self.error or repr(error)
            self.cost_s = time.thread_time() - started
            self._compiled.is_broken |= bool(self.error)

    def _update(self) -> None:
        self.forced = self._find_forced()
        matcher = self._matcher
        if self.error or matcher is None:
            return
        if self.forced is not None:
            self.mask = np.zeros_like(self.mask)
            self.mask.view(np.uint32)[self.forced // 32] = 1 << self.forced % 32
            return
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(self.mask)].copy()
        if past := self._vocab_size % 32:
            words[-1] &= (1 << past) - 1
        self.mask = words
        if matcher.is_error():
            self.error = next(iter(matcher.get_error().splitlines()), "the matcher failed")
        elif not words.any():
            self.error = "no token may follow"

    def _find_forced(self) -> int | None:
        if (matcher := self._catch_up()) is None:
            return None
        forced = self._compiler.forced_token(matcher)
        return forced if forced is not None and forced < self._vocab_size else None

    def _catch_up(self) -> LLMatcher | None:
        """Passes all new tokens of the completion to the matcher, and returns the matcher. Returns
        None if `error` is set."""
        if self.error:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._compiled.matcher.result().deep_copy()
        except TandemError as error:
            self.error = error.message
            return None
        self._matcher.consume_tokens(self._token_ids[self._num_consumed :])
        self._num_consumed = len(self._token_ids)
        return self._matcher


class _MaskThread:
    """A thread that computes masks one after the other. If one mask takes more than `patience_s`, a
    new thread takes over the waiting jobs, and the old thread ends after the slow mask."""

    def __init__(self, name: str, patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since = inf  # time at which the current job started; inf: no job runs

    def submit(self, function: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._start()
        job: Future[None] = Future()
        self._jobs.put((job, function))
        return job

    def replace_if_held_up(self) -> None:
        if time.perf_counter() - self._since > self._patience_s:
            self._start()

    def close(self) -> None:
        self._jobs.put(None)

    def _start(self) -> None:
        self._since = inf
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        thread = threading.current_thread()
        while self._thread is thread and (next_job := self._jobs.get()) is not None:
            job, function = next_job
            if job.set_running_or_notify_cancel():
                self._since = time.perf_counter()
                function()
                job.set_result(None)
            if self._thread is thread:
                self._since = inf
            # Without this line, a thread that waits for a job would keep the grammar of the last
            # job in memory.
            del next_job, job, function


class GrammarMasks:
    """The compiled grammars and mask threads of an engine. Only the engine's thread may call its
    methods."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        """`compiler` is None if the engine has no tokenizer; grammars are then refused."""
        self._compiler = compiler
        self.vocab_size = vocab_size
        self._compile_short = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compile_long = ThreadPoolExecutor(1, thread_name_prefix="long-grammar")
        self._fast = _MaskThread("mask", MASK_WAIT_S)
        self._new = _MaskThread("new-mask", MASK_WAIT_S)
        self._slow = _MaskThread("slow-mask", SKIPS_MAX * SKIP_S)
        self._mask_threads = self._fast, self._new, self._slow
        for thread in self._mask_threads:
            weakref.finalize(self, thread.close)
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_bytes = 0
        self._awaited: list[GrammarMatcher] = []
        self.search_s = 0.0  # seconds spent on the search for forced tokens in the current step

    def matcher(self, text: str, token_ids: list[int]) -> GrammarMatcher | None:
        """Returns a matcher for a completion that has the tokens `token_ids` so far and must match
        the grammar `text`. Returns None if `text` is empty. The grammar may still be compiling.
        Raises BadRequest if the engine has no compiler."""
        if not text:
            return None
        if self._compiler is None:
            raise BadRequest("this engine has no tokenizer, which a grammar needs")
        if text in self._compiled and self._compiled[text].is_broken:
            self._forget(text)
        if text not in self._compiled:
            thread = self._compile_long if len(text) > LONG_TEXT_BYTES else self._compile_short
            self._compiled[text] = _Compiled(thread.submit(self._compiler.compile, text))
            self._num_bytes += len(text)
            while len(self._compiled) > GRAMMARS_MAX or (
                self._num_bytes > GRAMMAR_BYTES_MAX and len(self._compiled) > 1
            ):
                self._forget(next(iter(self._compiled)))
        self._compiled.move_to_end(text)
        return GrammarMatcher(self, self._compiler, self._compiled[text], token_ids)

    @property
    def may_search(self) -> bool:
        """True while the time for forced tokens in this step is not used up."""
        return self.search_s < FORCED_SEARCH_S

    def begin(self, matcher: GrammarMatcher) -> None:
        """Starts to compute the matcher's next mask, unless it was started before."""
        if matcher.update_job is None:
            thread = self._new if matcher.cost_s is None else self._fast
            matcher.update_job = (self._slow if matcher.is_slow else thread).submit(matcher.update)

    def start(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Starts to compute the masks that a step needs. `wait` waits for them."""
        self._awaited = list(matchers)
        for matcher in self._awaited:
            self.begin(matcher)
        self.search_s = 0.0

    def wait(self, until: float = inf) -> None:
        """Waits for the masks that `start` began, but not after the time `until` of
        `time.perf_counter()`."""
        for matcher in self._awaited:
            job = matcher.update_job
            if job is not None and not job.done():
                left_s = max(0.0, until - time.perf_counter())
                wait([job], None if left_s == inf else left_s)
        self._awaited = []
        self._replace_threads()

    def wait_for_any(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Waits until the mask of one of the matchers is ready, at most `MASK_WAIT_S`."""
        jobs = [matcher.update_job for matcher in matchers if matcher.update_job is not None]
        wait(jobs, MASK_WAIT_S, FIRST_COMPLETED)
        self._replace_threads()

    def _replace_threads(self) -> None:
        for thread in self._mask_threads:
            thread.replace_if_held_up()

    def _forget(self, text: str) -> None:
        del self._compiled[text]
        self._num_bytes -= len(text)
