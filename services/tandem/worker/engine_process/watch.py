"""Sees an engine that hangs, and one that cannot pull any more: from joining to the drain's end.

    silent   somebody waits, and the engine makes no turn: it writes its stacks, and is ended
    stuck    its quarantine stays past the budget: the worker is to give up, in order

Knows no request; the worker says whether anybody waits.
"""

import asyncio
from collections.abc import Callable

from tandem.common.config.worker import WorkerConfig
from tandem.net.store.registry import WorkerLoad
from tandem.worker.engine_process.link import EngineLink

TURN_S = 1.0


class EngineWatch:
    """Counts how long the engine is silent or its quarantine is too large, and then ends it.

    `turn_for_ever` may be cancelled and called again; the counts go on."""

    def __init__(
        self,
        config: WorkerConfig,
        link: EngineLink,
        load: Callable[[], WorkerLoad],
        *,
        is_used: Callable[[], bool],
        give_up: Callable[[str], None],
    ) -> None:
        """`is_used`: whether the worker holds anything for anybody."""
        self._timeout_s = config.engine_hang_timeout_s
        self._quarantine_blocks_max = config.transfer.quarantine_blocks_max
        self._link = link
        self._load = load
        self._is_used = is_used
        self._give_up = give_up
        self._num_reports = 0  # of the engine, at the last turn
        self._silent_s = 0.0
        self._stuck_s = 0.0

    async def turn_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.turn()

    def turn(self) -> None:
        """Looks at the engine once, `TURN_S` after the look before."""
        stuck = self._load().blocks_quarantined > self._quarantine_blocks_max
        self._stuck_s = self._stuck_s + TURN_S if stuck else 0.0
        if self._stuck_s > self._timeout_s:
            self._give_up(f"the quarantine is past its budget for {self._stuck_s:.0f} s")
        num_reports = self._num_reports
        self._num_reports = self._link.num_reports
        # A consumer gives up before this watch does, and its command to remove waits then.
        waits = self._is_used() or self._link.is_awaited
        if not waits or self._num_reports != num_reports:
            self._silent_s = 0.0
            return
        # By turns, not by the clock: who was stopped with its engine must not blame it.
        self._silent_s += TURN_S
        if self._timeout_s - TURN_S < self._silent_s <= self._timeout_s:
            self._link.tell_stacks()
        if self._silent_s > self._timeout_s:
            self._link.kill(f"the engine made no turn for {self._silent_s:.0f} s")
