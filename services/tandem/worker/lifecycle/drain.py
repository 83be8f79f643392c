"""The drain of a worker: waits until it has no sequences and leases, and logs what it waits for."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tandem.worker.decode.service import DecodeService
from tandem.worker.prefill.service import PrefillService

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TELL_S = 5.0  # seconds between two log lines about the drain


async def drain(
    decode: DecodeService, prefill: PrefillService, ends_at: Callable[[], float]
) -> None:
    """Returns when no sequence and no lease is left, at the latest at `ends_at`.

    `ends_at` returns a time.monotonic() time. A second request to stop may make that time earlier.
    """
    began = told = time.monotonic()
    while decode.num_sequences or prefill.num_leases:
        now = time.monotonic()
        if now > ends_at():
            log.warning(
                "the drain deadline has passed after %.1f s, so %d sequences and %d leases are "
                "aborted (%s)",
                now - began,
                decode.num_sequences,
                prefill.num_leases,
                describe(decode, prefill, now),
            )
            return
        if now - told > _TELL_S:
            told = now
            log.info(
                "draining has taken %.0f s so far and still waits for %s",
                now - began,
                describe(decode, prefill, now),
            )
        await asyncio.sleep(_POLL_S)
    log.info("drained in %.1f s: no sequence and no lease is left", time.monotonic() - began)


def describe(decode: DecodeService, prefill: PrefillService, now: float) -> str:
    """Describes what a drain waits for: the sequences and leases, and the age of the oldest one."""
    waits = Counter(_waits(decode, prefill))
    begun = [s.submitted_at for s in decode.sequences] + [x.opened_at for x in prefill.leases]
    oldest_s = now - min(begun, default=now)
    kinds = [f"{text}: {count}" for text, count in sorted(waits.items())]
    return f"{', '.join(kinds)}; the oldest is {oldest_s:.1f} s old"


def _waits(decode: DecodeService, prefill: PrefillService) -> Iterator[str]:
    for sequence in decode.sequences:
        yield f"sequences {sequence.state.value}"
    for lease in prefill.leases:
        kind = "cache leases" if lease.is_hold else "leases"
        yield f"{kind} of {lease.consumer_id} {lease.stage}"
