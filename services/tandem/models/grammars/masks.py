"""Follows the completions that have a grammar, and makes the mask of each next token.

    compile threads  text -> compiled grammar, cached; a sequence is not admitted before it is there
    mask threads     while the model computes a step: take the tokens since the last step into
                     account, then fill the mask, a bit for each token of the vocabulary

A step waits `MASK_WAIT_S` at most for its masks. A sequence whose mask is late draws no token in
the step:

    the model computes ---> mask is ready --> draws
                       `--> mask is late ---> its last token is computed again, once it is ready

A late mask delays its sequence and changes no token. A sequence ends with an error if it skips
`SKIPS_MAX` steps while one mask is computed. The mask of a sequence whose last one was slow is made
before the sequence joins a step, so that the others do not wait for it.

Sequences whose last mask was fast, new sequences and slow ones have a thread each, and so have
short and long grammars: no number of slow ones holds up the others. A thread that one mask holds up
is replaced. Matchers of one grammar share its lexer, and use it in turn.

Where the grammar leaves only one text, its usual tokens are forced: no other spelling of it may
come. So the engine may append them without asking the model, and does not have to.

All threads run without the GIL for most of their time. A matcher that fails, because its work
exceeds llguidance's limits or because a token is not allowed, stays failed: the engine ends its
sequence.
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

GRAMMARS_MAX = 32  # compiled ones that are kept: 40 MB each at most, far less as a rule
GRAMMAR_BYTES_MAX = 1 << 20  # of their texts together
LONG_TEXT_BYTES = 16 << 10  # of a grammar that may take seconds to compile
MASK_WAIT_S = 0.02  # from the start of a step; the model computes meanwhile
SLOW_MASK_S = 0.002  # of CPU time; an ordinary mask takes 0.1 ms, or 10 ms if it is the first
FORCED_SEARCH_S = 0.005  # in a step, by the engine's thread
SKIPS_MAX = 10
SKIP_S = 0.05  # shorter steps count together: a first mask may take longer than ten of them

Mask = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Compiled:
    matcher: Future[LLMatcher]  # at the grammar's start
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the lexer of its matchers
    is_broken: bool = False  # a matcher failed, and with it maybe the lexer


class GrammarMatcher:
    """The position of one completion in its grammar. `mask` is good until `append`."""

    def __init__(
        self,
        masks: GrammarMasks,
        compiler: GrammarCompiler,
        compiled: _Compiled,
        token_ids: list[int],
    ) -> None:
        """`token_ids`: of the completion so far."""
        self._masks = masks
        self._compiler = compiler
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._token_ids = list(token_ids)
        # llguidance fills whole words, of its own vocabulary.
        self._vocab_size = masks.vocab_size
        self.mask: Mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        self.forced: int | None = None  # the token that `mask` allows in the first place
        self.error = ""
        self.update_job: Future[None] | None = None  # of the next mask; it may be done
        self.is_started = False  # the job has the lexer, or is done
        self.num_skipped = 0  # steps since then
        self._counted_until = 0.0  # when a step counts again
        self.cost_s: float | None = None  # CPU time of the last mask

    @property
    def is_compiled(self) -> bool:
        """True once the grammar is compiled, or has failed to."""
        return self._compiled.matcher.done()

    @property
    def is_slow(self) -> bool:
        """True if its last mask was slow: the next one is made before its sequence joins a step."""
        return self.cost_s is not None and self.cost_s > SLOW_MASK_S

    @property
    def is_late(self) -> bool:
        """True while the mask of the next token is being made."""
        return self.update_job is not None and not self.update_job.done()

    def append(self, token_id: int) -> None:
        """Takes a token of the completion into account, with the next `update`."""
        self._token_ids.append(token_id)
        self.update_job, self.is_started, self.num_skipped = None, False, 0

    def cancel(self) -> None:
        """Makes no further mask: its sequence is gone."""
        if self.update_job is not None:
            self.update_job.cancel()

    def skip(self) -> str:
        """Counts a step that its sequence skips. Returns why it ends, after too many."""
        now = time.perf_counter()
        if self.is_started and now >= self._counted_until:
            self.num_skipped += 1
            self._counted_until = now + SKIP_S
        if self.num_skipped <= SKIPS_MAX:
            return ""
        return f"the form of its next token took more than {SKIPS_MAX} steps to compute"

    def find_forced(self) -> int | None:
        """Returns the next token if the grammar forces it; it follows from the tokens so far.
        Returns None, too, if it would take long to know."""
        # A mask of the same grammar may be late: waiting for the lexer would hold the GIL.
        if self.is_slow or not self._masks.may_search or not self._compiled.lock.acquire(False):
            return None
        started = time.perf_counter()
        try:
            return self._find_forced()
        finally:
            self._compiled.lock.release()
            self._masks.search_s += time.perf_counter() - started

    def update(self) -> None:
        """Makes the mask of the next token, or sets `error`."""
        with self._compiled.lock:
            self.is_started = True
            started = time.thread_time()
            try:
                self._update()
            except BaseException as error:  # a panic of llguidance is no Exception
                log.exception("a mask failed")
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
        """Returns the matcher after all tokens; None, with `error`, without one."""
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
    """A thread that makes masks in order. A mask that takes too long keeps its thread, and another
    one goes on with the rest."""

    def __init__(self, name: str, patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since = inf  # when its job began

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
            del next_job, job, function  # a job of an engine that is gone would keep its grammars


class GrammarMasks:
    """The grammars of an engine. Its methods are for the engine's thread."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        """Without a compiler there are no grammars."""
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
        self.search_s = 0.0  # of looking for forced tokens, since the last step began

    def matcher(self, text: str, token_ids: list[int]) -> GrammarMatcher | None:
        """Returns a matcher after the completion's tokens so far, None for no text. It may not be
        compiled yet. Raises BadRequest without a compiler."""
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
        """True while the engine's thread may look for forced tokens in this step."""
        return self.search_s < FORCED_SEARCH_S

    def begin(self, matcher: GrammarMatcher) -> None:
        """Begins to make the next mask, unless it is begun already."""
        if matcher.update_job is None:
            thread = self._new if matcher.cost_s is None else self._fast
            matcher.update_job = (self._slow if matcher.is_slow else thread).submit(matcher.update)

    def start(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Begins to make the next masks of these, which a step needs."""
        self._awaited = list(matchers)
        for matcher in self._awaited:
            self.begin(matcher)
        self.search_s = 0.0

    def wait(self, until: float = inf) -> None:
        """Returns once the masks of `start` are there, or at a time of `perf_counter`."""
        for matcher in self._awaited:
            job = matcher.update_job
            if job is not None and not job.done():
                left_s = max(0.0, until - time.perf_counter())
                wait([job], None if left_s == inf else left_s)
        self._awaited = []
        self._replace_threads()

    def wait_for_any(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Returns once one of the late masks is there, or after the time of a step."""
        jobs = [matcher.update_job for matcher in matchers if matcher.update_job is not None]
        wait(jobs, MASK_WAIT_S, FIRST_COMPLETED)
        self._replace_threads()

    def _replace_threads(self) -> None:
        for thread in self._mask_threads:
            thread.replace_if_held_up()

    def _forget(self, text: str) -> None:
        del self._compiled[text]
        self._num_bytes -= len(text)
