"""Notes the work that requests count for their tenants."""

from __future__ import annotations

import pytest

from tandem.router.admission.turns import Claim, Turns


def note_counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list that gets what requests with a turn count for their tenants from now on, in
    seconds of work. Corrections may be negative."""
    counted: list[float] = []
    pop, settle = Turns.pop, Turns.settle

    def pop_and_note(turns: Turns[object]) -> object:
        claims = dict(turns._claims)
        item = pop(turns)
        counted.append(claims[item].cost)
        return item

    def settle_and_note(turns: Turns[object], claim: Claim, cost: float) -> None:
        counted.append(cost - claim.cost)
        settle(turns, claim, cost)

    monkeypatch.setattr(Turns, "pop", pop_and_note)
    monkeypatch.setattr(Turns, "settle", settle_and_note)
    return counted
