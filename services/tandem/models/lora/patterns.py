"""Matches the regular expressions of an adapter's config against the names of a model's matrices.

They come with the folder, and Python's matcher may take for ever, with its interpreter held. So a
child process matches them, with a bound on its time and its memory; this file is its program, which
loads nothing but the standard library.

    child, for each expression --> a line: [of each name: null, or what its first group has]
                               `-> a line: why it is no expression

PEFT's expressions are those of Python's `re`; a matcher in linear time knows fewer of them.
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

CPU_S = 1  # a usual config takes milliseconds
DEADLINE_S = 60.0  # on a machine that is busy
_MEMORY_BYTES = 1 << 30
_PLAIN_MAX = 2000
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)  # matches without a choice, so at once


class Pattern(NamedTuple):
    """An expression as the config's field has it, and the one that is matched."""

    field: str
    given: str
    expression: str
    is_whole: bool = False  # it has to match a whole name, and else a name's beginning

    @classmethod
    def of_end(cls, field: str, given: str) -> "Pattern":
        """Returns the pattern of the end of a name, as PEFT's `get_pattern_key` matches it."""
        return cls(field, given, rf"(.*\.)?({given})$")


def match_all(patterns: Sequence[Pattern], names: Sequence[str]) -> list[list[str | None]]:
    """Returns for each pattern and each name None, or the text of the first group of the match (""
    without a group). Raises UnsupportedModel naming a pattern that cannot be matched."""
    is_few = len(patterns) <= _PLAIN_MAX
    if is_few and all(_PLAIN.fullmatch(pattern.given) for pattern in patterns):
        return [_match(pattern, names) for pattern in patterns]
    from tandem.common.process.bounded_child import run_bounded

    told = json.dumps([[tuple(pattern) for pattern in patterns], list(names)])
    output, _ = run_bounded(
        [sys.executable, "-I", "-S", __file__],
        told.encode(),
        cpu_s=CPU_S,
        memory_bytes=_MEMORY_BYTES,
        deadline_s=DEADLINE_S,
    )
    answers = [json.loads(line) for line in output.split(b"\n")[:-1]]
    wrong = next((i for i, answer in enumerate(answers) if isinstance(answer, dict)), None)
    if wrong is not None:
        raise _refusal(patterns[wrong], f"is no regular expression: {answers[wrong]['why']}")
    if len(answers) < len(patterns):
        raise _refusal(
            patterns[len(answers)],
            f"cannot be matched in {CPU_S} s; write it without nested repetitions",
        )
    return answers


def _refusal(pattern: Pattern, why: str) -> Exception:
    from tandem.errors import UnsupportedModel

    return UnsupportedModel(f"{pattern.field} has {pattern.given!r:.80}, which {why}")


def _match(pattern: Pattern, names: Sequence[str]) -> list[str | None]:
    compiled = re.compile(pattern.expression)
    match = compiled.fullmatch if pattern.is_whole else compiled.match
    found = map(match, names)
    has_group = compiled.groups > 0
    return [None if m is None else (m[1] or "") if has_group else "" for m in found]


def main() -> None:
    patterns, names = json.load(sys.stdin)
    for pattern in patterns:
        try:
            answer: object = _match(Pattern(*pattern), names)
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            answer = {"why": f"{type(error).__name__} {error}"[:200]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
