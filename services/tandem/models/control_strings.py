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
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers


class ControlStrings:
    """The special tokens of one tokenizer, as strings. Threads may share it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, nonce: str) -> None:
        """`nonce` is what no client can guess."""
        added = tokenizer.get_added_tokens_decoder().values()
        self._tokenizer = tokenizer
        # The longest first, as the tokenizer matches them.
        self._strings = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._strings)) or "(?!)")
        self.nonce = nonce
        self._mark_pattern = re.compile(f"{nonce}mark([0-9]+)end")

    def are_in(self, messages: Sequence[Mapping[str, str]]) -> bool:
        return any(self._pattern.search(text) for m in messages for text in m.values())

    def mark(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        """Returns the messages with a mark in place of each control string."""
        return [{k: self._pattern.sub(self._mark, v) for k, v in m.items()} for m in messages]

    def rename(self, rendered: str) -> str:
        """Returns the twin's text of a chat rendered from marked messages."""
        renamed = self._pattern.sub(lambda found: self._name(found[0]), rendered)
        return self._mark_pattern.sub(lambda found: self._strings[int(found[1])], renamed)

    def encode_renamed(self, text: str) -> list[int]:
        ids: list[int] = self._twin.encode(text, add_special_tokens=False).ids
        return ids

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
