"""Decides when a line of a batch may start: batches use only what other requests leave. No I/O.

All requests that are not lines of batches are called interactive. Engines compute interactive
requests first (engine/scheduler/scheduler.py), so lines that run beside them hardly delay them. A
line starts only if all of these hold:

- Few lines wait for their first token.
- No interactive request waits in the queue of a decode worker.
- A decode worker has free running slots for interactive requests that come, and room in its KV
  pool.

A router knows its own lines. It takes those of another router for interactive requests. Only one
router runs batches, so this matters only while another one takes over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.router.placement.costs import WorkerSnapshot

UNPLACED_MAX = 4  # started lines without a first token, for each prefill worker
KV_USE_MAX = 0.85  # above this use of a KV pool, no line starts
# Lines leave this share of a decode worker's running slots free, and at least one.
SLOTS_FREE_SHARE = 0.25
_SLOTS_UNKNOWN = 8  # assumed for a worker that does not report its running slots


@dataclass(frozen=True, slots=True)
class OpenLines:
    """The open lines of a router."""

    num_lines: int = 0
    num_lines_waiting: int = 0  # lines without a first token


def may_start(workers: Sequence[WorkerSnapshot], lines: OpenLines) -> bool:
    """Returns whether a line may start."""
    decode = [w for w in workers if w.usable and w.role == "decode"]
    num_waiting = sum(w.load.num_waiting for w in decode) - lines.num_lines_waiting
    if not decode or num_waiting > 0:
        return False
    prefill = [w for w in workers if w.usable and w.role == "prefill"] or decode
    if lines.num_lines_waiting >= UNPLACED_MAX * len(prefill):
        return False
    return any(w.load.kv_use <= KV_USE_MAX and _num_slots_free(w) > 0 for w in decode)


def is_short(workers: Sequence[WorkerSnapshot], lines: OpenLines) -> bool:
    """Returns whether lines take slots that interactive requests may need, so that one should
    stop."""
    decode = [w for w in workers if w.usable and w.role == "decode"]
    num_free = sum(_num_slots_free(w) for w in decode)
    return bool(decode) and lines.num_lines > 0 and num_free < 0


def _num_slots_free(worker: WorkerSnapshot) -> int:
    """Returns how many more lines may take running slots of a worker; below 0 if too many are
    taken."""
    load = worker.load
    num_slots = load.num_running_slots or _SLOTS_UNKNOWN
    kept_free = max(1, int(SLOTS_FREE_SHARE * num_slots))
    return max(1, num_slots - kept_free) - load.num_slots_taken - load.num_lines
