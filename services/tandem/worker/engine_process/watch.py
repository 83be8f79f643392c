"""Detects an engine that hangs or can no longer pull, while its worker serves or drains.

A fault is a condition that lasts for `engine_hang_timeout_s`:

    fault    condition                                         consequence
    silent   the engine has work, but sends no report          the engine logs its stacks and is
                                                               killed
    stuck    more blocks are in quarantine than are allowed    the worker drains and ends

This module knows no requests. The worker passes `is_used`, which returns whether there is work.
"""

from collections.abc import Callable

from tandem.common.config.worker import WorkerConfig
from tandem.common.process.ticks import sleep_until_tick
from tandem.common.worker_load import WorkerLoad
from tandem.worker.engine_process.link import EngineLink

TURN_S = 1.0


class EngineWatch:
    """Measures two durations: how long the engine has sent no report although it has work, and how
    long too many blocks have been in quarantine.

    `turn_for_ever` may be cancelled and called again. Both durations then continue.
    """

    def __init__(
        self,
        config: WorkerConfig,
        link: EngineLink,
        load: Callable[[], WorkerLoad],
        *,
        is_used: Callable[[], bool],
        give_up: Callable[[str], None],
    ) -> None:
        """`is_used` returns whether the worker has any sequence or lease. `give_up` drains the
        worker.
        """
        self._timeout_s = config.engine_hang_timeout_s
        self._quarantine_blocks_max = config.transfer.quarantine_blocks_max
        self._link = link
        self._load = load
        self._is_used = is_used
        self._give_up = give_up
        self._num_reports = 0  # number of reports received before the previous check
        self._silent_s = 0.0
        self._stuck_s = 0.0

    async def turn_for_ever(self) -> None:
        while True:
            await sleep_until_tick(TURN_S)
            self.turn()

    def turn(self) -> None:
        """Checks the engine once, `TURN_S` after the previous check."""
        stuck = self._load().blocks_quarantined > self._quarantine_blocks_max
        self._stuck_s = self._stuck_s + TURN_S if stuck else 0.0
        if self._stuck_s > self._timeout_s:
            self._give_up(
                f"for {self._stuck_s:.0f} s, more than {self._quarantine_blocks_max} KV blocks "
                "have been in quarantine, because abandoned reads may still write them"
            )
        num_reports = self._num_reports
        self._num_reports = self._link.num_reports
        # The worker has work if it has a sequence or a lease (`_is_used`). It also has work if it
        # waits for the engine to apply a command (`is_awaited`). For example, when the engine of a
        # prefill worker hangs, its consumers give up their leases, and only `Remove` commands wait.
        waits = self._is_used() or self._link.is_awaited
        if not waits or self._num_reports != num_reports:
            self._silent_s = 0.0
            return
        # The time is counted in checks, not read from a clock. If both processes are stopped for a
        # while, for example with the machine, no check runs, and the engine is not at fault.
        self._silent_s += TURN_S
        if self._timeout_s - TURN_S < self._silent_s <= self._timeout_s:
            self._link.tell_stacks()
        if self._silent_s > self._timeout_s:
            self._link.kill(f"the engine made no progress for {self._silent_s:.0f} s")
