"""Compiles grammar texts for the vocabulary of a model, within limits.

llguidance bounds its memory and its work by counts, not by time, so that the same grammar fails on
every machine or on none. A compiled grammar is a matcher at its start; sequences copy it.
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

# All sequences of a grammar share its lexer: about 40 MB at most. The time of a mask grows with the
# items that it adds, and with the square of those in a row, which an ambiguous grammar adds with
# each token: 10 ms at most, where the defaults allowed 0.5 s. An object takes four items in a row
# for each property that may be left out.
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
_SPECIAL_TOKEN = re.compile(rb"\xff\[(\d+)\]")  # as llguidance writes one between bytes
# llguidance tokenizes the whole of a forced text for each of its tokens, and holds the GIL.
_FORCED_BYTES_MAX = 256


@dataclass(slots=True)
class GrammarCompiler:
    """Compiles for one model. It reads the tokenizer when the first grammar comes."""

    tokenizer_file: Path
    vocab_size: int  # of the model's logits
    eos_token_ids: Sequence[int]
    _tokenizer: LLTokenizer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, folder: ModelFolder) -> Self:
        """Returns a compiler for a model."""
        config = folder.config
        return cls(folder.path / "tokenizer.json", config.vocab_size, config.eos_token_ids)

    def compile(self, text: str) -> LLMatcher:
        """Returns a matcher at the grammar's start; the GIL is free meanwhile. Raises BadRequest
        with the reason if the grammar is invalid, unsupported or too large."""
        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(matcher.get_error())
        matcher.compute_ff_bytes()  # copies know what it forces at its start
        return matcher

    def check(self, text: str) -> str:
        """Returns why no completion can follow the grammar; empty if one can."""
        try:
            matcher = self.compile(text)
        except BadRequest as error:
            return error.message
        # A form begins with what it forces, such as a brace: what may follow has to fit, too. A
        # special token stands there as a byte that is in no text.
        begins = matcher.compute_ff_bytes()
        if begins and _SPECIAL not in begins:
            text = begins.decode(errors="ignore")
            matcher.consume_tokens(self._vocabulary().greedy_tokenize(text))
        matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text matches it"
        return ""

    def forced_token(self, matcher: LLMatcher) -> int | None:
        """Returns the next token if the grammar leaves one text only.

        llguidance reads a special token where this text is spelled like one, although the grammar
        does not allow it. There the text goes on with its longest plain token. Of a long text only
        the beginning is tokenized.
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
        """Reads the tokenizer now."""
        self._vocabulary()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                eos = [token_id for token_id in self.eos_token_ids if token_id < self.vocab_size]
                if not eos:
                    raise BadRequest("the model has no end-of-sequence token")
                text = self.tokenizer_file.read_text(encoding="utf-8")
                # It may have added tokens that the model has no logits of.
                num_tokens = max(Tokenizer.from_str(text).get_vocab().values()) + 1
                size = max(self.vocab_size, num_tokens)
                self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos)
            return self._tokenizer
