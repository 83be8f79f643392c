"""Ensures that a special token that a client writes in a chat message is encoded as ordinary text.

A message may contain the text `<|im_end|>`. If this text were encoded as the special token, it
would end the message, and the following text could impersonate the system. A chat in which a client
wrote the text of a special token (a control string) is therefore encoded in steps:

    mark      Each control string of the client is replaced by an unguessable mark.
    render    The model's template adds special tokens.
    rename    The special tokens that the template added are replaced by unguessable names.
    unmark    The marks are replaced by the client's control strings.
    encode    A copy of the tokenizer (the "twin") encodes the text. In the twin, the special tokens
              have the unguessable names.

Marks and names contain a nonce, a random text. With the nonce 7f3a, a client's `<|im_end|>` becomes
the mark `7f3amark2end`, and the template's `<|im_end|>` becomes the name `7f3atoken2end`.
Tokenizers of one model with the same nonce can encode each other's rendered texts.

The twin differs from the tokenizer only in these names. Normalizers and pre-tokenizers see the
client's text unchanged. A special token that is also an ordinary vocabulary entry has a new name in
the vocabulary, too, so the client's text cannot match it.

All strings of a chat are treated this way, including tools, arguments of calls, and options of the
template. In tool results, added tokens that look like tags (`</tool_response>`) are control
strings, too, although the tokenizer does not call them special. In other messages these tags stay,
because a template may search for them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import tokenizers

_MARK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


class ControlStrings:
    """For one tokenizer, ensures that special tokens that clients write in messages are encoded as
    ordinary text. Threads may share the object."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, nonce: str) -> None:
        """`nonce` is a random string that clients cannot guess."""
        added = tokenizer.get_added_tokens_decoder().values()
        self._tokenizer = tokenizer
        special = {t.content for t in added if t.special}
        marks = {t.content for t in added if not t.single_word and _MARK.fullmatch(t.content)}
        # Longest first, as the tokenizer matches them. Marks contain an index into this list, so
        # the order must be the same in all processes.
        self._strings = sorted(special | marks, key=lambda string: (-len(string), string))
        self._any = _alternatives(self._strings)
        self._special = _alternatives([s for s in self._strings if s in special])
        self.nonce = nonce
        self._mark_pattern = re.compile(f"{nonce}mark([0-9]+)end")

    def are_in(self, value: Any) -> bool:
        """Returns whether any string in `value` (messages, tools or options) contains a control
        string."""
        return any(self._pattern(is_tool).search(text) for text, is_tool in _texts(value))

    def mark(self, value: Any, *, is_tool: bool = False) -> Any:
        """Returns a copy of `value` with a mark in place of each control string. `is_tool`: True if
        `value` is part of a tool's message."""
        if isinstance(value, str):
            return self._pattern(is_tool).sub(self._mark, value)
        if isinstance(value, Mapping):
            is_tool = is_tool or value.get("role") == "tool"
            mark = partial(self.mark, is_tool=is_tool)
            return {mark(key): mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, is_tool=is_tool) for item in value]
        return value

    def rename(self, rendered: str) -> str:
        """Converts a chat rendered from marked messages to the text that `encoding` accepts."""
        renamed = self._any.sub(lambda found: self._name(found[0]), rendered)
        return self._mark_pattern.sub(lambda found: self._strings[int(found[1])], renamed)

    def encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encodes a text returned by `rename`, and also gives the tokens' offsets in the text."""
        return self._twin.encode(text, add_special_tokens=add_special_tokens)

    def pair_encoding(self, first: str, second: str) -> tokenizers.Encoding:
        """Encodes two texts as the tokenizer joins them. Control strings in both are ordinary
        text."""
        return self._twin.encode(first, second)

    def _pattern(self, is_tool: bool) -> re.Pattern[str]:
        return self._any if is_tool else self._special

    def _mark(self, found: re.Match[str]) -> str:
        return f"{self.nonce}mark{self._strings.index(found[0])}end"

    def _name(self, string: str) -> str:
        return f"{self.nonce}token{self._strings.index(string)}end"

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer in which the special tokens have unguessable names. It is made at
        first use, because a large vocabulary takes a second."""
        names = {string: self._name(string) for string in self._strings}
        twin = json.loads(self._tokenizer.to_str())
        for token in twin["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = twin["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
        else:  # Unigram: a list of (piece, score), indexed by token id.
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return tokenizers.Tokenizer.from_str(json.dumps(twin))


def _alternatives(strings: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, strings)) or "(?!)")


def _texts(value: Any, *, is_tool: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields every string in a value, including keys of objects. The second element of a result is
    True if the string is part of a tool's message."""
    if isinstance(value, str):
        yield value, is_tool
    elif isinstance(value, Mapping):
        is_tool = is_tool or value.get("role") == "tool"
        for key, item in value.items():
            yield from _texts(key, is_tool=is_tool)
            yield from _texts(item, is_tool=is_tool)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, is_tool=is_tool)
