"""Stand-ins for parts of tiers: a thread that waits to be told, and a fixed rate."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.tiers.tier import LoadRate


class HeldThread:
    """Runs jobs when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def close(self, deadline_s: float) -> None:
        self.run(len(self.jobs))

    def run(self, num_jobs: int) -> None:
        for _ in range(min(num_jobs, len(self.jobs))):
            self.jobs.pop(0)()


class FixedRate(LoadRate):
    """Every block takes as long, whatever is measured."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s

    def observe(self, num_blocks: float, seconds: float) -> None:
        """Does nothing."""

    def decline(self) -> None:
        """Does nothing."""
