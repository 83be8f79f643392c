"""Compiles grammar texts for a model's vocabulary, within limits.

The limits of llguidance are counts of items and states, not times. So a grammar that is too large
fails on every machine, fast or slow. A compiled grammar is a matcher in its initial state, which
each sequence copies.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from tandem.errors import BadRequest
from tandem.models.folder import ModelFolder

# With these limits, a grammar takes at most about 40 MB, for the lexer that all sequences with the
# grammar share. A mask takes up to 10 ms; with llguidance's default limits it takes up to 500 ms.
# The time for a mask grows with the square of `max_items_in_row`. Each optional property of a JSON
# object needs four items in a row, so an object may have 800 / 4 = 200 optional properties.
_LIMITS = LLParserLimits(
    max_items_in_row=800,
    step_max_items=5_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

_SPECIAL = b"\xff"
# llguidance writes the special token 7 as b"\xff[7]" in a byte string.
_SPECIAL_TOKEN = re.compile(rb"\xff\[(\d+)\]")
# A text is forced if the grammar allows no other text next. To find the next token, at most this
# many bytes from the start of the forced text are tokenized. llguidance would tokenize the whole
# forced text for each token, and hold the GIL meanwhile.
_FORCED_BYTES_MAX = 256


@dataclass(slots=True)
class GrammarCompiler:
    """Compiles grammars for one model. The tokenizer is read at the first use or by `load`. Threads
    may share a compiler."""

    tokenizer_file: Path
    vocab_size: int  # number of logits that the model computes for each token
    eos_token_ids: Sequence[int]
    _tokenizer: LLTokenizer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, folder: ModelFolder) -> Self:
        """Makes a compiler for the model in `folder`."""
        config = folder.config
        return cls(folder.path / "tokenizer.json", config.vocab_size, config.eos_token_ids)

    def compile(self, text: str) -> LLMatcher:
        """Returns a matcher in the grammar's initial state. Releases the GIL while it compiles.
        Raises BadRequest with the reason if the grammar is invalid, unsupported or too large."""
        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(matcher.get_error())
        # The call computes the text with which every completion must begin. The matcher and its
        # copies keep the text, so no sequence computes it again.
        matcher.compute_ff_bytes()
        return matcher

    def check(self, text: str) -> str:
        """Returns the reason why no completion can match the grammar; "" if one can."""
        try:
            matcher = self.compile(text)
        except BadRequest as error:
            return error.message
        # If every completion begins with the same text, such as a brace, the mask after this text
        # is checked. If the text contains special tokens (marked by the byte `_SPECIAL`), the mask
        # of the first token is checked.
        begins = matcher.compute_ff_bytes()
        if begins and _SPECIAL not in begins:
            text = begins.decode(errors="ignore")
            matcher.consume_tokens(self._vocabulary().greedy_tokenize(text))
        matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text can match it"
        return ""

    def forced_token(self, matcher: LLMatcher) -> int | None:
        """Returns the next token if the grammar allows only one text; else None.

        A grammar may force the text `<|im_end|>` without allowing the special token with this text.
        llguidance returns the special token nevertheless. This method then returns the longest
        ordinary token with which the text begins, such as `<|`.
        """
        text: bytes = matcher.compute_ff_bytes()
        if not text:
            return None
        vocabulary = self._vocabulary()
        if len(text) > _FORCED_BYTES_MAX:
            if special := _SPECIAL_TOKEN.match(text):
                return int(special[1])
            begins = text[:_FORCED_BYTES_MAX].split(_SPECIAL)[0].decode(errors="ignore")
            usual: list[int] = vocabulary.tokenize_str(begins)[:1]
            if usual and matcher.validate_tokens(usual):
                return usual[0]
        forced: list[int] = matcher.compute_ff_tokens()
        if not forced:
            return None
        is_special = vocabulary.is_special_token(forced[0])
        if is_special and not matcher.deep_copy().try_consume_tokens(forced[:1]):
            forced = vocabulary.greedy_tokenize(text.decode(errors="ignore"))
        return forced[0]

    def load(self) -> None:
        """Reads the tokenizer now, so that the first grammar does not wait for it."""
        self._vocabulary()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                eos = [token_id for token_id in self.eos_token_ids if token_id < self.vocab_size]
                if not eos:
                    raise BadRequest("the model has no end-of-sequence token, which grammars need")
                text = self.tokenizer_file.read_text(encoding="utf-8")
                # The tokenizer may have added tokens whose ids are above the model's last logit.
                num_tokens = max(Tokenizer.from_str(text).get_vocab().values()) + 1
                size = max(self.vocab_size, num_tokens)
                self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos)
            return self._tokenizer
