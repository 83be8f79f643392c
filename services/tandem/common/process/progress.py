"""Progress bars of commands that wait, on stderr if it is a terminal.

The bars appear after `SHOWN_AFTER_S` and disappear at the end. If stderr is a file or a pipe, no
bars are shown.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

SHOWN_AFTER_S = 2.0
REDRAWS_PER_S = 10.0
_POLL_S = 0.5
# Largest number of rows that are shown, because a pool may have more workers than a screen has
# lines.
_STEPS_MAX = 8
_BAR_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """One row: a named part of a wait. `total` is 0 if it is unknown how much remains."""

    name: str
    note: str = ""
    done: float = 0.0
    total: float = 0.0


class Waiting:
    """The bars of one wait. Any thread may call its methods."""

    def __init__(self, *steps: ProgressRow, redraws_per_s: float = REDRAWS_PER_S) -> None:
        """If `redraws_per_s` is 0, bars are drawn only when they appear and at each `show`. So no
        other thread disturbs a measurement between two calls of `show`.
        """
        console = Console(stderr=True, highlight=False)
        self._is_seen = sys.stderr.isatty() and not console.is_dumb_terminal
        note = TextColumn(
            "{task.fields[note]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Bar(),
            note,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            auto_refresh=redraws_per_s > 0,
            refresh_per_second=redraws_per_s or REDRAWS_PER_S,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.RLock()
        self._is_on = self._is_over = False
        self._num_hiding = 0  # number of `with` statements of `hidden` that are running now
        self._timer = threading.Timer(SHOWN_AFTER_S, self._start)
        self._timer.daemon = True
        self.show(*steps)

    def __enter__(self) -> Self:
        if self._is_seen:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._is_on:
                self._bars.stop()
            self._is_on = False

    def show(self, *steps: ProgressRow) -> None:
        """Sets the rows. A row with the same name as before keeps its bar and its elapsed time."""
        with self._lock:
            steps = steps[:_STEPS_MAX]
            for name in self._tasks.keys() - {step.name for step in steps}:
                self._bars.remove_task(self._tasks.pop(name))
            for step in steps:
                if step.name not in self._tasks:
                    self._tasks[step.name] = self._bars.add_task(step.name, total=None, note="")
                self._bars.update(
                    self._tasks[step.name],
                    completed=step.done,
                    total=step.total or None,
                    note=step.note,
                )
            if self._is_on and not self._num_hiding and not self._bars.live.auto_refresh:
                self._bars.refresh()

    @contextmanager
    def polling(self, look: Callable[[], ProgressRow]) -> Iterator[None]:
        """Repeatedly shows the row that `look` returns, from a separate thread."""
        is_over = threading.Event()

        def poll() -> None:
            while not is_over.wait(_POLL_S):
                self.show(look())

        polling = threading.Thread(target=poll, name="progress", daemon=True)
        if self._is_seen:
            self.show(look())
            polling.start()
        try:
            yield
        finally:
            is_over.set()
            if self._is_seen:
                polling.join()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides the bars while the caller prints something else. It may be nested."""
        with self._lock:
            self._num_hiding += 1
            if self._is_on and self._num_hiding == 1:
                self._bars.stop()
            try:
                yield
            finally:
                self._num_hiding -= 1
                if self._is_on and not self._num_hiding:
                    self._bars.start()

    def _start(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_on = True
                self._bars.start()


class _Bar(ProgressColumn):
    """A bar; empty if it is unknown how much remains."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(_BAR_COLUMNS)

    def render(self, task: Task) -> ProgressBar | Text:
        return Text() if task.total is None else self._bar.render(task)
