from __future__ import annotations

import pytest

from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import MARGIN


def learn(calibration: Calibration, predicted_s: float, seen_s: float, times: int) -> Calibration:
    for _ in range(times):
        calibration = calibration.kept(Promise(predicted_s, promised_at=100.0), 100.0 + seen_s)
    return calibration


def test_learns_by_how_much_predictions_are_off_and_forgets_it() -> None:
    calibration = Calibration()
    assert calibration.factor == 1.0
    calibration = learn(calibration, 2.0, 5.0, 60)
    assert calibration.factor == pytest.approx(2.5, rel=0.01)
    calibration = learn(calibration, 2.0, 1.6, 60)
    assert calibration.factor == pytest.approx(0.8, rel=0.01)


def test_one_that_is_far_off_says_little() -> None:
    calibration = Calibration()
    calibration = learn(calibration, 1.0, 1000.0, 1)
    assert calibration.factor < 1.3
    calibration = learn(calibration, 1.0, 1000.0, 1000)
    assert calibration.factor == pytest.approx(8.0)
    calibration = learn(calibration, 1.0, 0.0, 1000)
    assert calibration.factor == pytest.approx(0.5)


def test_only_what_was_predicted_to_be_near_the_limit_counts() -> None:
    calibration = Calibration()
    assert calibration.promise(0.29, 1.0, 0.0) is None
    assert calibration.promise(0.31, 1.0, 0.0) is not None
    calibration = learn(calibration, 1.0, 4.0, 60)
    assert calibration.promise(0.1, 1.0, 0.0) is not None  # 0.4 by what was learned


def test_keeps_back_what_the_spread_asks_for() -> None:
    calibration = Calibration()
    assert calibration.margin == pytest.approx(MARGIN)
    calibration = learn(calibration, 1.0, 1.0, 200)
    assert calibration.margin == pytest.approx(0.85)
    for seen_s in [0.8, 1.25] * 200:  # a spread of 0.22 about none
        calibration = learn(calibration, 1.0, seen_s, 1)
    assert calibration.margin == pytest.approx(0.59, abs=0.04)
    calibration = learn(calibration, 1.0, 1000.0, 3)
    assert calibration.margin == pytest.approx(0.4)
    calibration = learn(calibration, 1.0, 1.0, 200)
    assert calibration.margin > 0.8
