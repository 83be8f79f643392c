"""Finds faults of a worker that serves: its clock, disk, peers or tiers. Does no I/O."""

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

from tandem.net.store.registry import WorkerRecord

_NO_ANSWER = re.compile("silent|time|unavailable|connect", re.IGNORECASE)

Trouble = Literal["", "clock", "disk", "unreachable", "tier", "stalled"]

CLOCK_OFF_S = 5.0
_DISK_FULL_SHARE = 0.02
_DISK_FULL_BYTES = 1 << 30  # a disk with at least this many free bytes is not full


def trouble_of(
    record: WorkerRecord, clock_ahead_s: float, blaming: Iterable[WorkerRecord]
) -> tuple[Trouble, str]:
    """Returns the trouble of a ready worker and a note for operators; ("", "") if it has none.

    - `clock_ahead_s` is the worker's clock minus this router's clock, in seconds. The caller has
      corrected an error of the router's own clock.
    - `blaming` has the records of live workers that report unreachable peers and are not at fault
      themselves (`blames_peers`).
    """
    if abs(clock_ahead_s) > CLOCK_OFF_S:
        way = "ahead of" if clock_ahead_s > 0 else "behind"
        return "clock", f"its clock is {abs(clock_ahead_s):.0f} s {way} this router's clock"
    free = record.disk_free_bytes
    total = record.disk_total_bytes
    if is_disk_full(free, total):
        room = f"{free / 1e9:.3g} of {total / 1e9:.3g} GB are free"
        return "disk", f"the disk of its logs or of its copies of KV blocks is full: {room}"
    if record.unreachable and not blames_peers(record):
        peer, why = next(iter(record.unreachable.items()))
        more = len(record.unreachable) - 1
        return "unreachable", f"it cannot read KV blocks from {peer}{_others(more)}: {why}"
    name = record.worker_id
    if who := [(r.worker_id, r.unreachable[name]) for r in blaming if name in r.unreachable]:
        first, why = who[0]
        more = len(who) - 1
        cut = ". Is the network between them down?" if _NO_ANSWER.search(why) else ""
        return "unreachable", f"{first}{_others(more)} cannot read KV blocks from it: {why}{cut}"
    if damaged := [
        f"{t.blocks_damaged} in the {t.name} tier" for t in record.tiers if t.blocks_damaged
    ]:
        blocks = " and ".join(damaged)
        return "tier", f"copies of KV blocks could not be read in the last 10 minutes: {blocks}"
    return "", ""


def is_disk_full(free_bytes: int, total_bytes: int) -> bool:
    """Returns whether a disk has too little room for a worker's logs and copies of KV blocks."""
    return free_bytes < min(_DISK_FULL_SHARE * total_bytes, _DISK_FULL_BYTES)


def blames_peers(record: WorkerRecord) -> bool:
    """Returns whether the worker's unreachable peers are at fault, and not the worker itself.

    If a worker cannot reach most of its peers, the worker itself is at fault.
    """
    return 0 < len(record.unreachable) <= max(1, len(record.pairs))


def _others(number: int) -> str:
    return f" and {number} more" if number else ""


def clock_of_router(ahead_s: Sequence[float]) -> float:
    """Returns by how many seconds this router's clock is probably behind the right time.

    `ahead_s` has each worker's clock minus this router's clock. If most of these differences are
    large, the router's clock is wrong, and the result is their median. Otherwise, or with fewer
    than three workers, the result is 0.
    """
    common_s = median(ahead_s) if len(ahead_s) > 2 else 0.0
    return common_s if abs(common_s) > CLOCK_OFF_S else 0.0
