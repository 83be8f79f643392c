"""Replacements for parts of tiers: a thread that runs jobs on command, and a fixed load rate."""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.tiers.tier import LoadRate


class HeldThread:
    """Queues jobs until `run` is called."""

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
    """A constant load time for each block, whatever is measured."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s

    def observe(self, num_blocks: float, seconds: float) -> None:
        """Does nothing."""

    def decline(self) -> None:
        """Does nothing."""
