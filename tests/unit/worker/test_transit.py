"""Messages that waited on their way are told from those of a host whose clock is another one."""

from __future__ import annotations

from tandem.worker.transit import Transit


def test_a_message_is_late_by_its_age_beyond_the_youngest() -> None:
    now = 100.0
    transit = Transit(lambda: now)
    # The sender's clock is 5,000 s ahead, and its fastest message takes 1 ms.
    assert transit.late_s(5100.0 - 0.001) == 0.0
    now = 101.0
    assert abs(transit.late_s(5101.0 - 0.701) - 0.7) < 0.01
    assert transit.late_s(5101.0 - 0.0005) == 0.0


def test_clocks_that_run_apart_make_nothing_late() -> None:
    now = 0.0
    transit = Transit(lambda: now)
    for second in range(1, 5000):
        now = float(second)
        assert transit.late_s(second * (1 - 2e-4)) < 1e-2


def test_an_older_sender_says_no_time() -> None:
    assert Transit().late_s(0.0) == 0.0
