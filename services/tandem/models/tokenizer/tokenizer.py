"""A model's tokenizer, read from its folder without transformers.

Text to token ids and back, and chats to text by the model's own template. Knows nothing of
requests: who may say what (roles, sizes) is the router's business.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders

from tandem.errors import BadRequest, ConfigError
from tandem.models.chat_template import NO_OPTIONS, ChatTemplate
from tandem.models.files import naming
from tandem.models.folder import ModelFolder
from tandem.models.tokenizer.check import check_rules
from tandem.models.tokenizer.control_strings import ControlStrings
from tandem.models.tokenizer_settings import end_token_ids, read_tokenizer_settings


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text to be encoded, or a piece of it. A chat has all its special tokens already."""

    text: str
    is_renamed: bool = False  # its special tokens have the names of `ControlStrings`
    add_special_tokens: bool = False  # also put around it what the model wants around a text


class Tokenizer:
    """The tokenizer of a model. Threads may share it; encoding runs without the GIL."""

    def __init__(self, folder: Path, *, nonce: str | None = None) -> None:
        """`folder` is a Hugging Face folder. `nonce` is that of another tokenizer of the folder,
        to share rendered chats with it. Raises ConfigError when the files cannot be read."""
        file = folder / "tokenizer.json"
        with naming(file):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self._control_strings = ControlStrings(self._tokenizer, nonce or secrets.token_hex(16))
        self._strips_spaces = any(token.lstrip or token.rstrip for token in added.values())
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self.is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self.chat_template = ChatTemplate.from_folder(
            folder, read_tokenizer_settings(folder / "tokenizer_config.json")
        )
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = end_token_ids(folder)

    @classmethod
    def of(cls, model: ModelFolder) -> Self:
        """Reads the tokenizer of a model. Raises ConfigError when the files cannot be read, or when
        the model has no embedding for some of its tokens.

        Tokens that were added beside the vocabulary may lack one, as in Gemma 3: prompts that have
        them are refused.
        """
        tokenizer = cls(model.path)
        vocabulary = tokenizer._tokenizer.get_vocab(with_added_tokens=False)
        last = max(set(vocabulary.values()) - tokenizer._added_ids, default=-1)
        if last >= model.config.vocab_size:
            raise ConfigError(
                f"{model.path / 'tokenizer.json'} has tokens up to number {last}, and vocab_size "
                f"of config.json is {model.config.vocab_size}: it is another model's tokenizer"
            )
        return tokenizer

    def check_rules(self) -> Iterator[str]:
        """Tries the rules, as `tokenizer_check.check_rules` does."""
        return check_rules(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Raises BadRequest for text that no UTF-8 can hold.

        `add_special_tokens` puts around it what the model wants around a text, such as bos; a
        rendered chat has that already.
        """
        ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            check_unicode(text)
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; unknown ids are left out, invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the prompt of a chat, to be encoded with `add_special_tokens=False`.

        Raises BadRequest when the model has no chat template, or its template refuses the chat.
        """
        if self.chat_template is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions with a prompt instead",
                param="messages",
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )

    def render_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedText:
        """Returns the text of a chat's prompt, which `encode_rendered` encodes. Special tokens come
        from the template only: those that the chat spells out are plain text.

        Raises BadRequest when the model has no chat template, or its template refuses the chat.
        """
        chat = (messages, tools, options)
        is_renamed = self._control_strings.are_in(chat)
        if is_renamed:
            chat = self._control_strings.mark(chat)
        if continue_final_message:
            text = self._render_unfinished(*chat)
        else:
            text = self.render_chat(*chat, add_generation_prompt=add_generation_prompt)
        if not is_renamed:
            return RenderedText(text)
        check_unicode(text)
        return RenderedText(self._control_strings.rename(text), is_renamed=True)

    def _render_unfinished(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Returns the prompt of a chat, cut at the end of the final message's content.

        It is cut at a tag that no client can guess. Where the template strips the content, the
        space behind the tag is gone, and then the text before the tag is stripped as well.
        """
        *earlier, final = messages
        content: Any = final.get("content")
        tag = f"{self.nonce}unfinished"
        if isinstance(content, list):
            *before, last = content
            content = last["text"]
            tagged_content: Any = [*before, {**last, "text": f"{content}{tag} "}]
        else:
            tagged_content = f"{content or ''}{tag} "
        tagged = [*earlier, {**final, "content": tagged_content}]
        rendered = self.render_chat(tagged, tools, options, add_generation_prompt=False)
        text, found, rest = rendered.rpartition(tag)
        if content is None or not found or content.strip() not in rendered:
            raise BadRequest(
                "the final message cannot be continued: it has no content, or the model's chat "
                "template changes it",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def encode_rendered(self, rendered: RenderedText) -> list[int]:
        """Returns the token ids of a text as `render_prompt` returns it."""
        ids: list[int] = self._encode_rendered(rendered).ids
        return ids

    def _encode_rendered(self, rendered: RenderedText) -> tokenizers.Encoding:
        adds = rendered.add_special_tokens
        if rendered.is_renamed:
            return self._control_strings.encoding(rendered.text, add_special_tokens=adds)
        return self._encode(rendered.text, adds)

    def encode_part(self, window: RenderedText, start: int, stop: int) -> list[int] | None:
        """Returns the ids of the tokens of `window.text[start:stop]`, as they are in the whole
        window; None if a token lies across `start` or `stop`. What the model wants around a text
        belongs to its first and its last part."""
        encoding = self._encode_rendered(window)
        ids: list[int] = encoding.ids
        first, last = 0, len(ids) if stop == len(window.text) else 0
        # Some offsets leave out spaces: a part ends with the last token that begins before its end.
        places = zip(encoding.offsets, encoding.sequence_ids, strict=True)
        for index, ((begin, end), sequence) in enumerate(places):
            if sequence is None:  # it stands for no text
                continue
            if begin < start < end or begin < stop < end:
                return None
            if begin < start:
                first = index + 1
            if begin < stop:
                last = max(last, index + 1)
        return ids[first:last]

    @cached_property
    def joined(self) -> frozenset[bytes]:
        """The pairs of a byte and the space or line break after it that some token has inside."""
        found: set[bytes] = set()
        for token_id in range(self.vocab_size):
            found.update(_BEFORE_SPACE.findall(self.token_bytes(token_id)))
        return frozenset(found)

    def count_tokens(self, piece: RenderedText) -> int:
        """Returns the number of tokens of a piece of a text. It has no spaces at its ends if a
        special token beyond them might swallow them, however many they are."""
        if self._strips_spaces:
            piece = RenderedText(piece.text.strip(), piece.is_renamed)
        return len(self.encode_rendered(piece))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it; an unknown id is an empty string."""
        return [self._tokenizer.id_to_token(id_) or "" for id_ in ids]

    @property
    def nonce(self) -> str:
        """The nonce for further tokenizers of this folder. No client may learn it."""
        return self._control_strings.nonce

    def added_token_id(self, string: str) -> int | None:
        """Returns the id of a token that is never made of others, special or not."""
        token_id: int | None = self._tokenizer.token_to_id(string)
        return token_id if token_id in self._added_ids else None

    def special_ids(self, strings: Iterable[str]) -> frozenset[int]:
        """Returns the ids of those strings that are special tokens."""
        ids = {self._tokenizer.token_to_id(string) for string in strings}
        return self._special_ids & ids

    def is_special(self, token_id: int) -> bool:
        """Returns whether `skip_special_tokens` leaves this token out of the text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, special or not, wherever it stands in a text."""
        if self.is_byte_level:
            return self.piece(token_id)
        token = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece's space

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text; only where `is_byte_level`, whose texts
        are nothing but their tokens' bytes in a row."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else _bytes_of(token)
        return piece


_BEFORE_SPACE = re.compile(rb"[^\s][ \n]")
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # of a SentencePiece model that falls back to bytes


def _bytes_of(token: str) -> bytes:
    """Decodes as tokenizers' ByteLevel does: through the byte alphabet, or, for a token with a
    letter outside it (an added token), its UTF-8."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


# GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others, in order, for
# the letters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


def check_unicode(text: str) -> None:
    """Raises BadRequest for text that no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error
