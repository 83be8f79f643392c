"""Logs changes: one line for each requested change of sizes, roles, workers or keys.

    change by 127.0.0.1:40312 over HTTP: sizes, before decode=1 prefill=1, after decode=2 prefill=1
    change by autoscaler of router-0: sizes, before decode=1, after decode=9: refused: ...
The first change was accepted, and the second change was refused. Each change is also added to the
cluster's audit trail.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tandem.errors import TandemError
from tandem.net.security.audit_trail import AuditTrail, Caller

log = logging.getLogger(__name__)

_LINE = "change by %s: %s, before %s, after %s"
_REFUSED = f"{_LINE}: refused: %s"
_TEXT_MAX = 200  # names, lists of sizes and reasons are logged with at most this many characters


@dataclass(slots=True)
class Change:
    """A requested change. The caller sets `before` and `after` when the values become known."""

    before: str = "unknown"
    after: str = "unknown"


@contextmanager
def logged_change(trail: AuditTrail, who: Caller, what: str) -> Iterator[Change]:
    """Logs the change when the `with` block ends.

    The change is logged as refused if the block raises a TandemError.
    """
    change = Change()
    try:
        yield change
    except TandemError as error:
        what, before, after, why = _shown(what, change.before, change.after, error.message)
        log.warning(_REFUSED, *_shown(str(who)), what, before, after, why)
        trail.add_change(who, what, before, after, error)
        raise
    what, before, after = _shown(what, change.before, change.after)
    log.info(_LINE, *_shown(str(who)), what, before, after)
    trail.add_change(who, what, before, after)


def shown_sizes(sizes: Mapping[str, Any]) -> str:
    """Returns sizes as text, such as `decode=1 prefill=2`, sorted by name."""
    return " ".join(f"{pool}={size}" for pool, size in sorted(sizes.items())) or "none"


def _shown(*parts: str) -> list[str]:
    return [part[:_TEXT_MAX] for part in parts]
