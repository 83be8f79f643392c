"""State machines: an enum of states, and one table of the transitions that are allowed."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


class ForbiddenTransition(AssertionError):
    """A state machine was to make a transition that its table does not have: a bug of ours."""


def transition(state: S, to: S, allowed: Mapping[S, Collection[S]]) -> S:
    """Returns `to`. Raises ForbiddenTransition unless the table has the way there from `state`."""
    if to not in allowed[state]:
        raise ForbiddenTransition(f"{state} -> {to}")
    return to
