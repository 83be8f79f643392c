"""Matches the regular expressions of an adapter's config against a model's module names.

The expressions are untrusted, and Python's matcher can take exponential time while it holds the
GIL. A child process with limited time and memory therefore matches them. This file is the child's
program and imports only the standard library.

For each valid expression the child prints a JSON list with one entry per name. The entry is null if
the name does not match, else the text of the expression's first group. For example, the expression
`layers.([0-9]+)` and the names ["norm", "layers.3"] give [null, "3"]. For an invalid expression the
child prints {"why": reason}.

The child uses Python's `re`, as PEFT does. Linear-time matchers do not support all of its syntax.
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

CPU_S = 1  # maximum CPU seconds of the child process; usual configs take milliseconds
DEADLINE_S = 60.0  # maximum elapsed seconds; far more than CPU_S, because the machine may be busy
_MEMORY_BYTES = 1 << 30
_PLAIN_MAX = 2000
# Expressions that consist only of these characters are matched without a child process. Such an
# expression has no repetition, so matching it cannot take exponential time.
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)


class Pattern(NamedTuple):
    """A pattern that an adapter's config has in `field`. `given` is the text in the config, and
    `expression` is the regular expression made from it."""

    field: str
    given: str
    expression: str
    is_whole: bool = False  # True: matches whole names. False: matches at the start of a name.

    @classmethod
    def of_end(cls, field: str, given: str) -> "Pattern":
        """Makes a pattern that matches the end of a name, as PEFT's `get_pattern_key` does."""
        return cls(field, given, rf"(.*\.)?({given})$")


def match_all(patterns: Sequence[Pattern], names: Sequence[str]) -> list[list[str | None]]:
    """Matches each pattern against each name. result[i][j] is None if pattern i does not match name
    j. Otherwise it is the text of the pattern's first group, or "" if the pattern has no group.

    Raises UnsupportedModel naming a pattern that is invalid or takes too long."""
    is_few = len(patterns) <= _PLAIN_MAX
    if is_few and all(_PLAIN.fullmatch(pattern.given) for pattern in patterns):
        return [_match(pattern, names) for pattern in patterns]
    from tandem.common.process.bounded_child import run_bounded

    request = json.dumps([[tuple(pattern) for pattern in patterns], list(names)])
    output, _ = run_bounded(
        [sys.executable, "-I", "-S", __file__],
        request.encode(),
        cpu_s=CPU_S,
        memory_bytes=_MEMORY_BYTES,
        deadline_s=DEADLINE_S,
    )
    answers = [json.loads(line) for line in output.split(b"\n")[:-1]]
    wrong = next((i for i, answer in enumerate(answers) if isinstance(answer, dict)), None)
    if wrong is not None:
        raise _refusal(
            patterns[wrong], f"is not a valid regular expression: {answers[wrong]['why']}"
        )
    if len(answers) < len(patterns):
        raise _refusal(
            patterns[len(answers)],
            f"cannot be matched in {CPU_S} s; write the pattern without nested repetitions",
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
