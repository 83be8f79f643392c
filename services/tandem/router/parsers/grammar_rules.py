"""Writes the grammar rules that all constrained answers share, such as the rule for reasoning.

Some strings, such as <think>, are a single added token of the model. The grammar contains the ids
of these tokens, because llguidance does not match added tokens as text.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.router.parsers.formats import ReasoningTags, ToolFormat

_ANY_TEXT = "/(?s:.*)/"
_SPACE = r"/[ \n]{1,4}/"


@dataclass(slots=True)
class GrammarRules:
    """Writes and collects the rules of one grammar, in llguidance's variant of Lark."""

    terminals: Sequence[str]  # strings that end free text, such as "</think>" or "<tool_call>"
    split_at_added: Callable[[str], Sequence[tuple[str, int | None]]]  # of the model's tokenizer
    rules: list[str] = field(default_factory=list)

    def thought(self, tags: ReasoningTags, *, is_open: bool) -> str:
        """Returns the rule of optional reasoning at the start of an answer.

        `is_open` is True if the prompt ends with the tag that opens reasoning. Then the answer
        begins within reasoning and must contain only the tag that closes reasoning.
        """
        thought = f"{self.up_to(tags.closes)} {self.rule(_SPACE)}?"
        return thought if is_open else f"({self.text(tags.opens)} {thought})?"

    def form(self, tool_format: ToolFormat, around_content: Sequence[tuple[str, str]]) -> str:
        """Returns the rule of an answer's constrained part, `@form`, with the markup before it."""
        opens = self.text(tool_format.opens_answer)
        if around_content:
            opens = f"({' | '.join(self.text(opens) for opens, _ in around_content)})?"
        return f"{opens} @form".lstrip()

    def up_to(self, end: str, characters: str = _ANY_TEXT) -> str:
        """Returns the rule of free text, followed by the string `end`.

        The free text matches the pattern `characters`. It does not contain the terminal that occurs
        in `end`, because the parser would end the text there. Example: free text before
        "\\n</think>" does not contain "</think>".
        """
        found = (t for t in self.terminals if t in end)
        closes = min(found, key=lambda t: (end.index(t), -len(t)))
        number = len(self.rules)
        (lead, token_id), *rest = self.split_at_added(closes)
        if token_id is None and rest:  # an added token inside the terminal, which no text contains
            lead = end[: end.index(closes)] + lead
            self.rules.append(f"r{number}[lazy]: {characters} {json.dumps(lead)}")
            # Only text without a limit of its length may contain `lead`, as in "a</b".
            times = "+" if characters == _ANY_TEXT else ""
            return self.rule(f"r{number}{times} {self.text(end.removeprefix(lead))}")
        bare = re.escape(closes).replace("/", r"\/")
        self.rules.append(f"T{number}: {characters} & ~/(?s:.*){bare}(?s:.*)/")
        if token_id is not None:
            return self.rule(f"T{number} {self.text(end)}")
        self.rules.append(f"r{number + 1}[lazy]: T{number} {json.dumps(end)}")
        return f"r{number + 1}"

    def rule(self, body: str) -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def text(self, text: str, name: str = "", number: str = "") -> str:
        """Returns the grammar's notation for a fixed text: quoted strings and ids of added tokens.

        In the text, `%s` is replaced by `name`, and `%d` by the grammar term `number`.
        """
        terms = []
        for piece in re.split("(%d)", text):
            if piece == "%d":
                terms.append(number)
                continue
            for part, token_id in self.split_at_added(piece):
                literal = json.dumps(part.replace("%s", name))
                terms.append(literal if token_id is None else f"<[{token_id}]>")
        return " ".join(terms)


def terminals_of(tool_format: ToolFormat, reasoning: ReasoningTags | None) -> list[str]:
    """Returns the strings that separate content, reasoning and calls in an answer."""
    # If the tool format parses reasoning itself, the tags of reasoning are terminals of its states.
    tags = () if reasoning is None or reasoning is tool_format.thought else reasoning.marks
    return [*{mark for state in tool_format.states.values() for mark in state.marks}, *tags]


def write_head(
    tool_format: ToolFormat,
    reasoning: ReasoningTags | None,
    *,
    around_content: Sequence[tuple[str, str]],
    split_at_added: Callable[[str], Sequence[tuple[str, int | None]]],
    begins_in_reasoning: bool,
) -> str:
    """Returns the grammar of an answer that may contain reasoning before its constrained part.

    In the grammar, `@form` stands for the constrained part. Returns "" if the model writes neither
    reasoning nor markup before the constrained part.
    """
    grammar = GrammarRules(terminals_of(tool_format, reasoning), split_at_added)
    head = [grammar.form(tool_format, around_content)]
    if reasoning is not None:
        head.insert(0, grammar.thought(reasoning, is_open=begins_in_reasoning))
    if head == ["@form"]:
        return ""
    return "\n".join([f"start: {' '.join(head)}", *grammar.rules])
