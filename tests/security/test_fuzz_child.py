"""The child process of the fuzzing detects the harm that its targets do."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.security.fuzz.child import HANG_S, ParserProcess

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]
SIZE = 20


class Numbers:
    """Inputs from 0 to 7."""

    seeds = st.just(0)

    def input_of(self, seeds: Sequence[int], chance: random.Random) -> int:
        return chance.randrange(8)


class Bad:
    """A target that does harm for the input 3."""

    source = Numbers()

    def __init__(self, harm: Callable[[], object]) -> None:
        self._harm = harm

    def check(self, value: int) -> None:
        if value == 3:
            self._harm()


def _raise() -> None:
    raise ValueError("bad")


def bad_targets(folder: Path) -> dict[str, Bad]:
    return {
        "raises": Bad(_raise),
        "grows": Bad(lambda: b"x" * (300 << 20)),
        "ends": Bad(lambda: os._exit(9)),
        "hangs": Bad(lambda: time.sleep(60)),
    }


@pytest.fixture
def child(hang_s: float) -> Iterator[ParserProcess]:
    child = ParserProcess(bad_targets, hang_s=hang_s)
    yield child
    child.close()


# The time limit is short only if an input hangs: allocating 300 MiB takes a second on a slow
# machine.
@pytest.mark.parametrize(
    ("target", "told", "hang_s"),
    [
        ("raises", "3: ValueError('bad')", HANG_S),
        ("ends", "3: the process ended with 9", HANG_S),
        ("hangs", "3: no end within 1 s", 1.0),
        ("grows", "3: it took ", HANG_S),
    ],
)
def test_harm_is_told_and_the_batch_goes_on(child: ParserProcess, target: str, told: str) -> None:
    chance = random.Random(5)
    num_bad = [chance.randrange(8) for _ in range(SIZE)].count(3)
    outcome = child.run(target, 5, SIZE)
    assert outcome.rss_bytes > 0
    assert all(failure.startswith(told) for failure in outcome.failures), outcome.failures
    # The peak of memory reveals only the first input that uses so much.
    assert len(outcome.failures) == (1 if target == "grows" else num_bad)
