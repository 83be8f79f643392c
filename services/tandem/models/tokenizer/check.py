"""Checks that the rules of a tokenizer.json neither run too long nor produce too much output.

A rule may be a regular expression that takes exponential time on some texts, replace a character by
a megabyte, or add a hundred thousand tokens to each text. A few texts are therefore tried when the
file is loaded, in a process with limited time and memory:
- `tandem up` uses a child process, before it starts anything else.
- A router uses its tokenizer process, while the router starts.
"""

import json
import math
import resource
import string
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from tandem.errors import ConfigError

LOAD_CPU_S = 60  # maximum CPU seconds to load a tokenizer and to try the test texts
MEMORY_BYTES = 8 << 30
TEXTS_S = 5.0
_DEADLINE_S = 300.0
_AROUND_MAX = 64  # maximum number of tokens, such as bos, that the rules add to an empty text
_TOKENS_PER_BYTE_MAX = 16
# Maximum length of the decoded text of a test's tokens, in characters per token.
_CHARACTERS_PER_TOKEN_MAX = 4096
_GROWTH_MAX = 64  # largest factor by which all replacement rules together may lengthen a text
# Length of the test texts that detect expressions with exponential time. On a text with this many
# equal letters, such an expression runs for a day.
_REPEATS = 40
# Length of the test texts that detect expressions with cubic time. On a text with this many
# letters, such an expression runs for minutes.
_RUN = 2000


def check_file(file: Path) -> None:
    """Checks a tokenizer.json in a child process. Raises ConfigError naming the file and the
    fault."""
    from tandem.common.process.bounded_child import run_bounded

    output, status = run_bounded(
        [sys.executable, "-I", "-m", __spec__.name],
        str(file).encode(),
        cpu_s=LOAD_CPU_S,
        memory_bytes=MEMORY_BYTES,
        deadline_s=_DEADLINE_S,
    )
    if status == 0:
        return
    lines = output.decode(errors="replace").splitlines() or [
        "loading it fails, or takes too much time or memory"
    ]
    raise ConfigError(f"{file} cannot be used: {lines[-1]}")


def check_rules(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Tries the tokenizer's rules on test texts. Raises ConfigError for a rule that takes too long
    or produces too much.

    The generator yields a message before each test. If a test does not end, the last message names
    the text. The caller must limit the time and memory of the process."""
    began = time.monotonic()
    _check_growth(tokenizer)
    around = len(tokenizer.encode("").ids)
    if around > _AROUND_MAX:
        raise ConfigError(
            f"the tokenizer adds {around} tokens to each text, even to an empty text; at most "
            f"{_AROUND_MAX} added tokens are allowed"
        )
    for text in _texts():
        shown = text if len(text) < 8 else f"{text[:4]}... ({len(text)} characters)"
        yield f"the tokenizer fails or does not end on the text {json.dumps(shown)}"
        ids = tokenizer.encode(text).ids
        tokens_max = around + 64 + _TOKENS_PER_BYTE_MAX * len(text.encode())
        if len(ids) > tokens_max:
            raise ConfigError(
                f"the tokenizer makes {len(ids)} tokens of the text {json.dumps(shown)}; at most "
                f"{tokens_max} tokens are allowed"
            )
        num_characters = len(tokenizer.decode(ids))
        characters_max = 64 + _CHARACTERS_PER_TOKEN_MAX * len(ids)
        if num_characters > characters_max:
            raise ConfigError(
                f"the tokenizer decodes {len(ids)} tokens to a text of {num_characters} "
                f"characters; at most {characters_max} characters are allowed"
            )
        if time.monotonic() - began > TEXTS_S:
            raise ConfigError(f"the tokenizer takes more than {TEXTS_S:g} s for a few short texts")


def _check_growth(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises ConfigError if the replacement rules could make a text too long.

    The largest possible growth is computed from the rules: a rule that replaces "ab" by 6
    characters makes a text at most 3 times as long. Test texts would not show the growth if they do
    not contain the replaced string.
    """
    for part in ("normalizer", "decoder"):
        if (component := getattr(tokenizer, part)) is None:
            continue
        growth = 1.0
        rules = [json.loads(component.__getstate__())]
        while rules:
            rule = rules.pop()
            rules += rule.get(f"{part}s") or []
            if rule["type"] == "Replace":
                replaced = max(1, len(rule["pattern"].get("String", "")))
                growth *= max(1.0, len(rule["content"]) / replaced)
        if growth > _GROWTH_MAX:
            raise ConfigError(
                f"the tokenizer's {part} can make a text {growth:.3g} times longer; the limit "
                f"is {_GROWTH_MAX} times"
            )


def _texts() -> Iterator[str]:
    letters = [*string.printable, "é", "ß", "Ж", "中", "あ", "🙂", "\u0301", "\u00a0"]
    yield from letters
    # Some matchers do not try an expression such as (a+)+! on a text that does not contain "!".
    # `endings` therefore contains every ASCII character with which an expression may end.
    endings = "\0" + "".join(3 * mark for mark in string.punctuation) + string.printable
    for ending in ("!", "a", "1", " ", "\n", "\0", endings):
        for letter in letters:
            yield letter * _REPEATS + ending
    for word in (
        "a",
        "1",
        " ",
        "\n",
        "=",
        "中",
        "ab",
        "a1",
        " a",
        "a.",
        "A b-",
        "aa ",
        "\n a",
        "_x",
    ):
        yield word * (_RUN // len(word)) + "!"


def main() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(sys.stdin.read())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound = math.ceil(used.ru_utime + used.ru_stime + TEXTS_S)
    resource.setrlimit(resource.RLIMIT_CPU, (bound, bound))
    try:
        for what in check_rules(tokenizer):
            print(what, flush=True)
    except ConfigError as error:
        print(error.message, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
