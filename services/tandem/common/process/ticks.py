"""Sleeps that end together, so that an idle machine wakes rarely.

A process has many loops that do a little work about once a second. If each loop slept on its own,
the process would wake for each of them, and most of the CPU time of an idle process is spent on
waking. A tick is a multiple of an interval on the monotonic clock, which all processes of a machine
share. Loops that sleep until the next tick run directly after each other.
"""

import asyncio
import time


def until_tick_s(interval_s: float, after_s: float = 0.0) -> float:
    """Returns the seconds until `after_s` after a tick of `interval_s`: from half an interval to
    one and a half.

    The lower limit keeps two runs of a loop apart, even if a timer ends slightly early.
    """
    left_s = interval_s - (time.monotonic() - after_s) % interval_s
    return left_s if left_s >= interval_s / 2 else left_s + interval_s


async def sleep_until_tick(interval_s: float, after_s: float = 0.0) -> None:
    """Sleeps until a tick of `interval_s`, as `until_tick_s` says."""
    await asyncio.sleep(until_tick_s(interval_s, after_s))
