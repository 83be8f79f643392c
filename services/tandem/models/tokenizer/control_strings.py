"""Keeps special tokens that clients write into a chat's messages plain text.

A message may hold `<|im_end|>`. Read as the special token it would end the message, and what
follows could speak as the system. So a chat whose messages hold such strings is encoded in steps:

    mark      each such string in a message becomes a mark that no client can guess
    render    the model's template adds its own special tokens
    rename    the template's special tokens get names that no client can guess
    unmark    marks become the client's strings again
    encode    by a twin of the tokenizer, whose special tokens have those names

Tokenizers of one model with one nonce share marks and names: the text that one of them renders,
another may encode.

The twin differs by nothing else, so that normalizers and pre-tokenizers see the text that they
would see, and a vocabulary that holds a special token as a piece cannot match it either.

The same holds for every string of a chat: tools, arguments of calls, options of the template. In a
tool's result, added tokens that look like marks (`</tool_response>`) are text, too, although the
tokenizer does not call them special: in other messages a template may look for them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import tokenizers

_MARK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


class ControlStrings:
    """The special tokens of one tokenizer, as strings. Threads may share it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, nonce: str) -> None:
        """`nonce` is what no client can guess."""
        added = tokenizer.get_added_tokens_decoder().values()
        self._tokenizer = tokenizer
        special = {t.content for t in added if t.special}
        marks = {t.content for t in added if not t.single_word and _MARK.fullmatch(t.content)}
        # The longest first, as the tokenizer matches them. The order is the same in each process.
        self._strings = sorted(special | marks, key=lambda string: (-len(string), string))
        self._any = _alternatives(self._strings)
        self._special = _alternatives([s for s in self._strings if s in special])
        self.nonce = nonce
        self._mark_pattern = re.compile(f"{nonce}mark([0-9]+)end")

    def are_in(self, value: Any) -> bool:
        """Returns whether a string anywhere in these messages, tools or options has one."""
        return any(self._pattern(is_tool).search(text) for text, is_tool in _texts(value))

    def mark(self, value: Any, *, is_tool: bool = False) -> Any:
        """Returns the value with a mark in place of each control string. `is_tool`: it is part of
        a tool's message."""
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
        """Returns the twin's text of a chat rendered from marked messages."""
        renamed = self._any.sub(lambda found: self._name(found[0]), rendered)
        return self._mark_pattern.sub(lambda found: self._strings[int(found[1])], renamed)

    def encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Returns the tokens of a text that `rename` returned, with their places in it."""
        return self._twin.encode(text, add_special_tokens=add_special_tokens)

    def _pattern(self, is_tool: bool) -> re.Pattern[str]:
        return self._any if is_tool else self._special

    def _mark(self, found: re.Match[str]) -> str:
        return f"{self.nonce}mark{self._strings.index(found[0])}end"

    def _name(self, string: str) -> str:
        return f"{self.nonce}token{self._strings.index(string)}end"

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        """Made for the first chat that needs it: the file of a large vocabulary takes a second."""
        names = {string: self._name(string) for string in self._strings}
        twin = json.loads(self._tokenizer.to_str())
        for token in twin["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = twin["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
        else:  # Unigram: pieces with their scores, in the order of ids
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return tokenizers.Tokenizer.from_str(json.dumps(twin))


def _alternatives(strings: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, strings)) or "(?!)")


def _texts(value: Any, *, is_tool: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields every string in a value, keys too, and whether it is part of a tool's message."""
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
