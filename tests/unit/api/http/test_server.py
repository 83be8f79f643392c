"""The number of connections that the limit of open files allows."""

from __future__ import annotations

import resource

import pytest

from tandem.api.http.server import _affordable_connections


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "num"),
    [
        (20_000, 20_000, None, 4096),
        (1024, 524_288, 8448, 4096),
        (1024, resource.RLIM_INFINITY, 8448, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 4096),
        (1024, 1024, 1024, 384),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed(
    soft: int,
    hard: int,
    raised_to: int | None,
    num: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    was_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: was_set.append(limits))
    assert _affordable_connections(4096) == num
    assert was_set == ([] if raised_to is None else [(raised_to, hard)])
    assert ("raise `ulimit -n` to 8448" in caplog.text) == (num < 4096)
