"""The formats of one model's answers, chosen from its own files or by options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.router.parsers.formats import ReasoningTags, ToolFormat
from tandem.router.parsers.machine import Machine, Rules, State, Text

_PLAIN = ToolFormat(states={"content": State(Text.CONTENT)})


def machine_of(
    tools: ToolFormat | None,
    reasoning: ReasoningTags | None,
    *,
    schemas: Mapping[str, Any],
    one_call_only: bool = False,
    begins_in_reasoning: bool = False,
) -> Machine:
    """Returns the machine of one answer. `schemas` are of the functions' parameters, by name."""
    tool_format = tools or _PLAIN
    states, start = dict(tool_format.states), tool_format.start
    if reasoning is not None:
        states["reasoning"] = State(Text.REASONING, {reasoning.closes: start})
        states["begin"] = State(Text.BETWEEN, {reasoning.opens: "reasoning"}, otherwise=start)
        start = "reasoning" if begins_in_reasoning else "begin"
    rules = Rules(
        make_id=tool_format.make_id,
        name_of=tool_format.name_of,
        schemas=schemas,
        known_names_only=tool_format.known_names_only,
        one_call_only=one_call_only,
        trims_lines=tool_format.trims_lines,
    )
    return Machine(states, start, rules)
