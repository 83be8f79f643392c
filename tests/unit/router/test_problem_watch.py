"""Each problem is told once, in the log and in the events, and so is each process that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.router.workers.problem_watch import ProblemWatch
from tandem.router.workers.rows import WorkerRow


def watch() -> tuple[ProblemWatch, list[tuple[str, str, str]]]:
    told: list[tuple[str, str, str]] = []
    events: Any = SimpleNamespace(add=lambda k, about, text, once: told.append((k, about, text)))
    return ProblemWatch(events), told


def pools(state: str, starts: int, **more: Any) -> dict[str, Any]:
    agent = {"id": "decode-0", "state": state, "starts": starts, **more}
    return {"router": {"agents": [{"id": "r"}]}, "decode": {"agents": [agent]}}


def test_a_problem_is_told_when_it_begins_and_when_it_is_over() -> None:
    found, told = watch()
    for note in ("it has not reported for 3 s", "it has written nothing for 4 s"):
        found.note([WorkerRow("decode-0", "decode", "silent", note)], {}, {})
    assert told == [("silent", "decode-0", "it has not reported for 3 s")]
    found.note([WorkerRow("decode-0", "decode", "ready")], {}, {"head": "Ray's head is gone"})
    assert told[1:] == [
        ("well", "decode-0", "it is ready again; it was silent"),
        ("problem", "head", "Ray's head is gone"),
    ]
    found.note([WorkerRow("decode-0", "decode", "ready")], {}, {})
    assert told[3:] == [("well", "head", "the problem is over")]


def test_a_process_that_ended_is_told_once_however_fast_the_next_one_runs() -> None:
    found, told = watch()
    found.note([], pools("running", 0), {})
    ended = {"exit": "ended by SIGKILL", "last_line": "a last word"}
    for state, starts in (("restarting", 0), ("running", 1), ("running", 1)):
        found.note([], pools(state, starts, **ended), {})
    assert told == [("ended", "decode-0", "was ended by SIGKILL after it had logged: a last word")]
    found.note([], pools("running", 2, **ended), {})
    assert len(told) == 2, "its restart was too fast to be seen"
    assert found.num_starts == {"decode-0": 2}


def test_a_later_end_is_told_where_an_agent_counts_anew() -> None:
    """Ray's head was started again in between: both are first restarts of their agents."""
    found, _ = watch()
    keys = list[str]()
    found._events = SimpleNamespace(add=lambda *_, once: keys.append(once))  # type: ignore[assignment]
    for since in (1000.0, 2000.0):
        found.note([], pools("running", 0, since=since - 100), {})
        found.note([], pools("restarting", 0, since=since), {})
        found.note([], {}, {})
    assert len(set(keys)) == 2
    found.note([], pools("running", 0, since=1900), {})
    found.note([], pools("running", 1, since=2000.5), {})
    assert keys[2] == keys[1], "another router that saw the same end later"
