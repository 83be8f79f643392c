"""A mask that comes late drops its sequence from a step, and no token is put into a state twice."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tandem.models.grammars.masks import GrammarMatcher
from tests.engine_driver import drive_all, make_spec
from tests.grouped_toy import STATE, continuation, make_grouped_engine
from tests.toy_runner import VOCABULARY


class AllowsAll(GrammarMatcher):
    """Allows all tokens. Every third mask comes later than a step waits for it."""

    __slots__ = ("_num_updates",)

    is_compiled = True

    def __init__(self) -> None:
        self._token_ids = []
        bits = np.arange(32 * -(-VOCABULARY // 32)) < VOCABULARY
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)
        self.forced = None
        self.error = ""
        self.update_job = None
        self.is_started = False
        self.num_skipped = 0
        self._counted_until = 0.0
        self.cost_s = None
        self._num_updates = 0

    def find_forced(self) -> None:
        return None

    def update(self) -> None:
        self.is_started = True
        self._num_updates += 1
        if self._num_updates % 3 == 0:
            time.sleep(0.06)
        self.cost_s = 0.0


@pytest.mark.parametrize("windows", [(None,), (None, STATE)])
@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_late_mask_changes_no_token(
    windows: tuple[int | None, ...], launches_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make_grouped_engine(windows, num_blocks=60)
    monkeypatch.setattr(runner, "launches_ahead", launches_ahead)
    monkeypatch.setattr(
        engine._grammars, "matcher", lambda text, ids: AllowsAll() if text else None
    )
    prompt = list(range(6))
    spec = make_spec("masked", prompt, max_tokens=14, grammar="x")
    outcome = drive_all(engine, spec, make_spec("other", [40, 41], max_tokens=30))
    assert outcome.token_ids["masked"] == continuation(prompt, 14, windows)
