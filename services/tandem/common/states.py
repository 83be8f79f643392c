"""Checks the transitions of state machines, each of which is an enum of states with one table of
allowed transitions."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


class ForbiddenTransition(AssertionError):
    """A state machine was to make a transition that the table of transitions does not allow. This
    is a bug."""


def transition(state: S, to: S, allowed: Mapping[S, Collection[S]]) -> S:
    """Returns the new state `to`. Raises ForbiddenTransition if `allowed` does not list it for the
    current state."""
    if to not in allowed[state]:
        raise ForbiddenTransition(f"{state} -> {to}")
    return to
