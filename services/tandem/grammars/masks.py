"""Follows the completions that have a grammar, and makes the mask of each next token.

    compile thread   text -> compiled grammar, cached; a sequence is not admitted before it is there
    mask thread      while the model computes a step: takes the tokens since the last step into
                     account, then fills the mask, a bit for each token of the vocabulary

Where the grammar leaves only one text, its usual tokens are forced: no other spelling of it may
come. So the engine may append them without asking the model, and does not have to.

Both threads run without the GIL for most of their time. A matcher that fails, because its work
exceeds llguidance's limits or because a token is not allowed, stays failed: the engine ends its
sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tandem.errors import BadRequest, TandemError
from tandem.grammars.compiler import GrammarCompiler

GRAMMARS_MAX = 32  # compiled ones that are kept: 40 MB each at most, far less as a rule
GRAMMAR_BYTES_MAX = 1 << 20  # of their texts together

Mask = npt.NDArray[np.int32]


class GrammarMatcher:
    """The position of one completion in its grammar. `mask` is good until `append`."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        compiled: Future[LLMatcher],
        vocab_size: int,
        token_ids: list[int],
    ) -> None:
        """`token_ids`: of the completion so far."""
        self._compiler = compiler
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._token_ids = list(token_ids)
        # llguidance fills whole words, of its own vocabulary.
        self._vocab_size = vocab_size
        self.mask: Mask = np.zeros(-(-vocab_size // 32), np.int32)
        self.forced: int | None = None  # the token that `mask` allows in the first place
        self.error = ""

    @property
    def is_compiled(self) -> bool:
        """True once the grammar is compiled, or has failed to."""
        return self._compiled.done()

    def append(self, token_id: int) -> None:
        """Takes a token of the completion into account, with the next `update`."""
        self._token_ids.append(token_id)

    def find_forced(self) -> int | None:
        """Returns the next token if the grammar forces it. It follows from the tokens so far."""
        if (matcher := self._catch_up()) is None:
            return None
        forced = self._compiler.forced_token(matcher)
        return forced if forced is not None and forced < self._vocab_size else None

    def update(self) -> None:
        """Makes the mask of the next token, or sets `error`."""
        self.forced = self.find_forced()
        matcher = self._matcher
        if self.error or matcher is None:
            return
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(self.mask)].copy()
        if past := self._vocab_size % 32:
            words[-1] &= (1 << past) - 1
        if self.forced is not None:
            words[:] = 0
            words.view(np.uint32)[self.forced // 32] = 1 << self.forced % 32
        self.mask = words
        if matcher.is_error():
            self.error = next(iter(matcher.get_error().splitlines()), "the matcher failed")
        elif not words.any():
            self.error = "no token may follow"

    def _catch_up(self) -> LLMatcher | None:
        """Returns the matcher after all tokens; None, with `error`, without one."""
        if self.error:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._compiled.result().deep_copy()
        except TandemError as error:
            self.error = error.message
            return None
        self._matcher.consume_tokens(self._token_ids[self._num_consumed :])
        self._num_consumed = len(self._token_ids)
        return self._matcher


class GrammarMasks:
    """The grammars of an engine. Its methods are for the engine's thread."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        """Without a compiler there are no grammars."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._compile_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0
        self._updating: Future[None] | None = None

    def matcher(self, text: str, token_ids: list[int]) -> GrammarMatcher | None:
        """Returns a matcher after the completion's tokens so far, None for no text. It may not be
        compiled yet. Raises BadRequest without a compiler."""
        if not text:
            return None
        if self._compiler is None:
            raise BadRequest("this engine has no tokenizer, which a grammar needs")
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._compile_thread.submit(self._compiler.compile, text)
            self._compiled[text] = compiled
            self._num_bytes += len(text)
            while len(self._compiled) > GRAMMARS_MAX or (
                self._num_bytes > GRAMMAR_BYTES_MAX and len(self._compiled) > 1
            ):
                oldest, _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(oldest)
        self._compiled.move_to_end(text)
        return GrammarMatcher(self._compiler, compiled, self._vocab_size, token_ids)

    def start(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Begins to make the next masks of these; `wait` is called before any other change."""
        if matchers := list(matchers):
            self._updating = self._mask_thread.submit(_update, matchers)

    def wait(self) -> None:
        """Returns once the masks that `start` began are there."""
        if self._updating is not None:
            self._updating.result()
            self._updating = None


def _update(matchers: list[GrammarMatcher]) -> None:
    for matcher in matchers:
        matcher.update()
