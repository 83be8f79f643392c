"""Detects an engine that hangs or cannot pull any more, from joining to the end of the drain.

    fault    condition                                         consequence
    silent   the engine has work, but makes no turn            it logs its stacks and is killed
    stuck    more blocks are in quarantine than are allowed    the worker drains and ends

This module knows no requests. The worker passes `is_used`, which returns whether there is work.
"""

import asyncio
from collections.abc import Callable

from tandem.common.config.worker import WorkerConfig
from tandem.common.worker_load import WorkerLoad
from tandem.worker.engine_process.link import EngineLink

TURN_S = 1.0


class EngineWatch:
    """Measures how long the engine has been silent and how long its quarantine has been too large.

    After the time limit, the engine is killed or the worker drains. `turn_for_ever` may be
    cancelled and called again; the measured times continue.
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
        self._num_reports = 0  # number of the engine's reports at the previous check
        self._silent_s = 0.0
        self._stuck_s = 0.0

    async def turn_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.turn()

    def turn(self) -> None:
        """Checks the engine once, `TURN_S` after the previous check."""
        stuck = self._load().blocks_quarantined > self._quarantine_blocks_max
        self._stuck_s = self._stuck_s + TURN_S if stuck else 0.0
        if self._stuck_s > self._timeout_s:
            self._give_up(f"the quarantine is past its budget for {self._stuck_s:.0f} s")
        num_reports = self._num_reports
        self._num_reports = self._link.num_reports
        # Leases alone do not tell whether the engine has work to do: a consumer gives up its lease
        # before this time limit, and then only the `Remove` command of the lease is still awaited.
        waits = self._is_used() or self._link.is_awaited
        if not waits or self._num_reports != num_reports:
            self._silent_s = 0.0
            return
        # Count turns, not clock time: if this process was stopped with its engine, the engine is
        # not at fault.
        self._silent_s += TURN_S
        if self._timeout_s - TURN_S < self._silent_s <= self._timeout_s:
            self._link.tell_stacks()
        if self._silent_s > self._timeout_s:
            self._link.kill(f"the engine made no turn for {self._silent_s:.0f} s")
