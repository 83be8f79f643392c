"""A model's tokenizer, read from its folder without transformers.

The tokenizer converts text to token ids and back, and chats to text with the model's chat template.
It does not validate requests; the router checks roles and sizes.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders

from tandem.errors import BadRequest, ConfigError
from tandem.models.chat_template import NO_OPTIONS, ChatTemplate
from tandem.models.config.encoder import is_encoder
from tandem.models.files import naming, read_json_if_any
from tandem.models.folder import ModelFolder
from tandem.models.tokenizer.check import check_rules
from tandem.models.tokenizer.control_strings import ControlStrings
from tandem.models.tokenizer.pair_template import Pair
from tandem.models.tokenizer_settings import end_token_ids, read_tokenizer_settings


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text to encode, or a piece of one. The text is a plain prompt, or a rendered chat, which
    already contains special tokens."""

    text: str
    is_renamed: bool = False  # True: special tokens have the names that `ControlStrings` gives.
    add_special_tokens: bool = False  # True: encoding adds tokens such as bos.


class Tokenizer:
    """The tokenizer of a model. It is safe to share between threads; encoding releases the GIL."""

    def __init__(self, folder: Path, *, nonce: str | None = None) -> None:
        """Reads the tokenizer of a Hugging Face folder. Raises ConfigError if its files cannot be
        read.

        If one process renders a chat and another encodes it, both need tokenizers with the same
        `nonce`."""
        file = folder / "tokenizer.json"
        with naming(file):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self._control_strings = ControlStrings(self._tokenizer, nonce or secrets.token_hex(16))
        self._strips_spaces = any(token.lstrip or token.rstrip for token in added.values())
        self._added_ids = frozenset(added)
        self._id_of_added = {token.content: token_id for token_id, token in added.items()}
        self._special_in: dict[str, frozenset[int]] = {}  # string -> special tokens in it
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self.is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self.chat_template = ChatTemplate.from_folder(
            folder, read_tokenizer_settings(folder / "tokenizer_config.json")
        )
        # True: a text that is too long loses its end, because the model is an encoder. Else the
        # text loses its beginning.
        self.cuts_end = is_encoder(read_json_if_any(folder / "config.json"))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = end_token_ids(folder)

    @classmethod
    def of(cls, model: ModelFolder) -> Self:
        """Reads the tokenizer of a model. Raises ConfigError if a file cannot be read, or if the
        vocabulary is larger than the model's embedding.

        Added tokens may lack an embedding, as in Gemma 3; prompts that contain them are refused.
        """
        tokenizer = cls(model.path)
        vocabulary = tokenizer._tokenizer.get_vocab(with_added_tokens=False)
        last = max(set(vocabulary.values()) - tokenizer._added_ids, default=-1)
        if last >= model.config.vocab_size:
            raise ConfigError(
                f"{model.path / 'tokenizer.json'} belongs to another model: it has token ids "
                f"up to {last}, but vocab_size in config.json is {model.config.vocab_size}"
            )
        return tokenizer

    def check_rules(self) -> Iterator[str]:
        """Tries the tokenizer's rules, as `check.check_rules` does."""
        return check_rules(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Raises BadRequest for a text with lone surrogates.

        `add_special_tokens` adds the tokens that the model expects around a text, such as bos. A
        rendered chat already contains them.
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
        """Returns the text of `ids`. Unknown ids are left out; invalid UTF-8 becomes U+FFFD."""
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
        """Returns the prompt text of a chat, to be encoded with `add_special_tokens=False`.

        Raises BadRequest if the model has no chat template, or its template refuses the chat.
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
        """Returns the text of a chat's prompt, which `encode_rendered` encodes. Only the template
        produces special tokens; the text of a special token in a message is ordinary text.

        `continue_final_message` ends the prompt at the end of the last message's content. Raises
        BadRequest if the model has no chat template, its template refuses the chat, or the final
        message cannot be continued.
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
        """Returns the prompt text of a chat up to the end of the final message's content.

        To find the end, an unguessable tag and a space are appended to the content, and the
        rendered text is cut before the tag. If no space follows the tag in the rendered text, the
        template strips spaces around content. Spaces before the tag are then stripped as well.
        """
        *earlier, final = messages
        content: Any = final.get("content")
        tag = f"{self.nonce}unfinished"
        if isinstance(content, list):
            *before, last = content
            content = last.get("text")  # None: the content ends with an image
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
        """Returns the token ids of a text that `render_prompt` returned."""
        ids: list[int] = self._encode_rendered(rendered).ids
        return ids

    def _encode_rendered(self, rendered: RenderedText) -> tokenizers.Encoding:
        adds = rendered.add_special_tokens
        if rendered.is_renamed:
            return self._control_strings.encoding(rendered.text, add_special_tokens=adds)
        return self._encode(rendered.text, adds)

    def truncated(self, token_ids: list[int], kept: int) -> list[int]:
        """Returns at most `kept` of a prompt's token ids: the last ones, or with `cuts_end` those
        that transformers keeps. Then the prompt loses the last tokens of its text, but not the
        tokens that the model expects around a text, such as [CLS] and [SEP]. Raises BadRequest if
        there are more of these."""
        if len(token_ids) <= kept:
            return token_ids
        if not self.cuts_end:
            return token_ids[-kept:]
        before, after = self._around
        if not after or token_ids[-len(after) :] != after:
            after = []
        if kept < (least := len(before) + len(after)):
            raise BadRequest(
                f"truncate_prompt_tokens is {kept}; it must be at least {least}, the number of "
                "tokens around a text",
                param="truncate_prompt_tokens",
            )
        return token_ids[: kept - len(after)] + after

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The token ids that encoding adds before and after a text."""
        encoding = self._encode("a", True)
        of_text = [at for at, of in enumerate(encoding.sequence_ids) if of is not None]
        ids: list[int] = encoding.ids
        return (ids[: of_text[0]], ids[of_text[-1] + 1 :]) if of_text else ([], [])

    def encode_part(self, window: RenderedText, start: int, stop: int) -> list[int] | None:
        """Encodes `window` and returns the ids of the tokens in `window.text[start:stop]`; None if
        a token crosses `start` or `stop`. Tokens that are added at the start of the text, such as
        bos, are included if `start` is 0, and those at the end if `stop` is the end of the text."""
        encoding = self._encode_rendered(window)
        ids: list[int] = encoding.ids
        first = 0
        last = len(ids) if stop == len(window.text) else 0
        # The result ends with the last token that begins before `stop`. This token may end before
        # `stop`, too, because the offsets of some tokenizers leave out spaces.
        places = zip(encoding.offsets, encoding.sequence_ids, strict=True)
        for index, ((begin, end), sequence) in enumerate(places):
            if sequence is None:  # an added token such as bos, which has no text
                continue
            if begin < start < end or begin < stop < end:
                return None
            if begin < start:
                first = index + 1
            if begin < stop:
                last = max(last, index + 1)
        return ids[first:last]

    def encode_pair(self, pair: Pair, kept: int | None = None) -> list[int]:
        """Returns the token ids of the prompt of a query and a document. Special tokens that a
        client wrote are ordinary text.

        `kept` is the largest number of tokens; None: no limit. The document's last tokens are left
        out to meet it. Raises BadRequest if the prompt without the document has more tokens, and
        for a text with lone surrogates.
        """
        for text in (pair.query, pair.document, pair.instruction):
            check_unicode(text)
        if pair.template is None:
            encoding = self._joined_pair(pair.query, pair.document)
            inside = [at for at, of in enumerate(encoding.sequence_ids) if of == 1]
        else:
            parts, is_renamed = self._pair_parts(pair)
            adds = not self.special_ids((pair.template.text,))
            encoding = self._encode_rendered(RenderedText("".join(parts), is_renamed, adds))
            start = len(parts[0])
            stop = start + len(parts[1])
            places = enumerate(zip(encoding.offsets, encoding.sequence_ids, strict=True))
            inside = [
                at
                for at, ((begin, end), of) in places
                if of is not None and start <= begin < stop and end <= stop
            ]
        ids: list[int] = encoding.ids
        surplus = 0 if kept is None else len(ids) - kept
        if surplus > len(inside):
            raise BadRequest(
                f"truncate_prompt_tokens is {kept}; it must be at least "
                f"{len(ids) - len(inside)}, the number of tokens of the prompt without the "
                "document",
                param="truncate_prompt_tokens",
            )
        left_out = set(inside[len(inside) - surplus :]) if surplus > 0 else set()
        return [token_id for at, token_id in enumerate(ids) if at not in left_out]

    def _joined_pair(self, query: str, document: str) -> tokenizers.Encoding:
        if self._control_strings.are_in((query, document)):
            return self._control_strings.pair_encoding(query, document)
        return self._tokenizer.encode(query, document)

    def _pair_parts(self, pair: Pair) -> tuple[tuple[str, str, str], bool]:
        """Returns the text of the prompt before the document, the document, and the text after it.
        The second result is True if special tokens are renamed in them."""
        assert pair.template is not None
        sent = (pair.instruction, pair.query, pair.document)
        if not self._control_strings.are_in(sent):
            return pair.template.parts(*sent), False
        parts = pair.template.parts(*self._control_strings.mark(sent))
        before, document, after = map(self._control_strings.rename, parts)
        return (before, document, after), True

    @cached_property
    def joined(self) -> frozenset[bytes]:
        """The two-byte sequences inside tokens in which a space or a line break follows a byte that
        is no white space. For example, the token "in a" contributes b"n ".

        Long texts are encoded in pieces. A text must not be split inside one of these sequences,
        because a token may contain the bytes on both sides of the split.
        """
        found: set[bytes] = set()
        for token_id in range(self.vocab_size):
            found.update(_BEFORE_SPACE.findall(self.token_bytes(token_id)))
        return frozenset(found)

    def count_tokens(self, piece: RenderedText) -> int:
        """Returns the number of tokens of a piece of text. If the tokenizer has special tokens that
        absorb neighbouring spaces, spaces at both ends of the piece do not count."""
        if self._strips_spaces:
            piece = RenderedText(piece.text.strip(), piece.is_renamed)
        return len(self.encode_rendered(piece))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each id; "" for an unknown id."""
        return [self._tokenizer.id_to_token(id_) or "" for id_ in ids]

    @property
    def nonce(self) -> str:
        """The nonce to pass to further tokenizers of this folder. Clients must not learn the
        nonce."""
        return self._control_strings.nonce

    def added_token_id(self, string: str) -> int | None:
        """Returns the id of the added token with this text. Returns None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(string)
        return token_id if token_id in self._added_ids else None

    @property
    def added_tokens(self) -> Collection[str]:
        """The texts of all added tokens."""
        return self._id_of_added.keys()

    def split_at_added(self, text: str) -> list[tuple[str, int | None]]:
        """Splits a text at the added tokens in it. Returns the parts in their order, each with the
        id of its added token; None for a part that is no added token."""
        ids = self._id_of_added
        inside = sorted((token for token in ids if token and token in text), key=len, reverse=True)
        if not inside:
            return [(text, None)] if text else []
        # Only the tokens that the text has: a pattern of all of them takes long to compile.
        parts = re.split(f"({'|'.join(map(re.escape, inside))})", text)
        return [(part, ids.get(part)) for part in parts if part]

    def special_ids(self, strings: Iterable[str]) -> frozenset[int]:
        """Returns the ids of the special tokens that occur in the strings."""
        found: set[int] = set()
        for string in strings:
            if string not in self._special_in:
                ids = {token_id for _, token_id in self.split_at_added(string)}
                self._special_in[string] = self._special_ids & ids
            found |= self._special_in[string]
        return frozenset(found)

    def is_special(self, token_id: int) -> bool:
        """Returns whether `skip_special_tokens` removes this token from the text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token, special or not, stands for inside a text. Unlike `piece`,
        this method works for all tokenizers."""
        if self.is_byte_level:
            return self.piece(token_id)
        token = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes a space as U+2581.

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text. Valid only if `is_byte_level`: only then
        is a text the concatenation of its tokens' bytes."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else _bytes_of(token)
        return piece


_BEFORE_SPACE = re.compile(rb"[^\s][ \n]")
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # byte tokens of SentencePiece models


def _bytes_of(token: str) -> bytes:
    """Converts a token to bytes as the ByteLevel decoder does: through the byte alphabet, or as
    UTF-8 if a letter is not in the alphabet (added tokens)."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return token.encode()


# GPT-2 represents each byte by a letter. The bytes in `_PRINTABLE` are represented by the character
# with the same code, and all other bytes, in order, by the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


def check_unicode(text: str) -> None:
    """Raises BadRequest if `text` contains a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error
