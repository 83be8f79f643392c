"""Decides when a line of a batch may start: batches use only what other requests leave. No I/O.

All requests that are not lines of batches are called interactive. A line starts only if all of
these hold:

- No interactive request waits for its first token, or in the queue of a decode worker.
- A prefill worker's queue is so short that an interactive request would hardly notice it.
- A decode worker has a free running slot besides the last one, and room in its KV pool.
- If interactive requests decode, the line lengthens their steps by at most `ITL_SHARE`. And lines
  then start so rarely that few of these steps compute a prompt, too.

A router knows its own lines. It takes those of another router for interactive requests. Only one
router runs batches, so this matters only while another one takes over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.router.placement.costs import WorkerSnapshot

QUEUE_S = 0.05  # a line starts behind prompts of at most this many seconds
ITL_SHARE = 0.08  # lines may make a decode step of interactive requests longer by this share
# Beside interactive requests, a line starts after this many of their steps at the earliest. So a
# prompt of a line delays at most one of 20 steps, which the 90th percentile does not see.
STEPS_APART = 20
UNPLACED_MAX = 4  # started lines without a first token, for each prefill worker
KV_USE_MAX = 0.85  # above this use of a KV pool, no line starts
_SLOTS_UNKNOWN = 8  # assumed for a worker that does not report its running slots


@dataclass(frozen=True, slots=True)
class Requests:
    """The open requests of a router."""

    num_lines: int = 0
    num_lines_waiting: int = 0  # lines without a first token
    num_left: int = 0  # lines that workers may still count, although they have left
    num_interactive: int = 0
    num_interactive_waiting: int = 0  # interactive requests without a first token


def may_start(workers: Sequence[WorkerSnapshot], requests: Requests, *, since_s: float) -> bool:
    """Returns whether a line may start. The last one started `since_s` seconds ago."""
    decode = [w for w in workers if w.usable and w.role == "decode"]
    num_waiting = sum(w.load.num_waiting for w in decode) - requests.num_lines_waiting
    if not decode or requests.num_interactive_waiting or num_waiting > 0:
        return False
    prefill = [w for w in workers if w.usable and w.role == "prefill"] or decode
    if requests.num_lines_waiting >= UNPLACED_MAX * len(prefill):
        return False
    if min(w.queue_s for w in prefill) > QUEUE_S:
        return False
    roomy = [w for w in decode if _has_room(w)]
    if not roomy:
        return False
    num_interactive = _num_interactive(decode, requests)
    if not num_interactive:
        return True
    step_s = max(w.rates.decode.seconds(w.load.num_slots_taken) for w in decode)
    if since_s < STEPS_APART * step_s / len(decode):
        return False
    allowed = len(decode) * lines_beside(roomy, num_interactive / len(decode))
    return requests.num_lines + 1 <= allowed


def is_short(workers: Sequence[WorkerSnapshot], requests: Requests) -> bool:
    """Returns whether so many lines run beside interactive requests that one should stop."""
    decode = [w for w in workers if w.usable and w.role == "decode"]
    num_interactive = _num_interactive(decode, requests)
    if not decode or not num_interactive:
        return False
    beside = lines_beside(decode, num_interactive / len(decode))
    return requests.num_lines > len(decode) * beside


def lines_beside(workers: Sequence[WorkerSnapshot], num_interactive: float) -> float:
    """Returns how many lines may run on a decode worker beside `num_interactive` sequences."""
    found = 0.0
    for worker in workers:
        rate = worker.rates.decode
        step_s = rate.step_s + rate.sequence_s * num_interactive
        allowed = ITL_SHARE * step_s / max(rate.sequence_s, 1e-9)
        found = max(found, allowed)
    return found


def _num_interactive(decode: Sequence[WorkerSnapshot], requests: Requests) -> int:
    """Returns the number of interactive requests, with those of other routers."""
    num_running = sum(w.load.num_slots_taken for w in decode)
    return max(requests.num_interactive, num_running - requests.num_lines - requests.num_left)


def _has_room(worker: WorkerSnapshot) -> bool:
    load = worker.load
    slots = load.num_running_slots or _SLOTS_UNKNOWN
    return load.num_slots_taken < max(1, slots - 1) and load.kv_use <= KV_USE_MAX
