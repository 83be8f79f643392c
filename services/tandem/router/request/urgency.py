"""Reads how urgent a request is: its priority, and the headers about waiting (over gRPC: metadata).

  field or header              effect while workers are busy
  priority                     lower values have their turns earlier, as in vLLM
  nvext.agent_hints.priority   higher values have their turns earlier, as in Dynamo
  x-tandem-deadline-ms         after this time without a first token, the request is refused
  x-tandem-may-shed            the request has its turn last, and is refused first

An API key may limit all of this (`net/security/limits.py`). No refusal comes after the first token.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import BadRequest
from tandem.net.security.limits import PRIORITY_MIN
from tandem.router.request.allowed import refusal

DEADLINE_HEADER = "x-tandem-deadline-ms"
SHED_HEADER = "x-tandem-may-shed"
DEADLINE_MAX_MS = 86_400_000
_YES = ("1", "true")
_NO = ("0", "false")


def priority_of(priority: int | None, hint: int | None) -> int:
    """Returns the priority of a request, lower is earlier. `hint` is Dynamo's priority, where
    higher is earlier; it counts if `priority` is None. Raises BadRequest."""
    if priority is None:
        priority = 0 if hint is None else -hint
    if not PRIORITY_MIN <= priority <= -PRIORITY_MIN:
        raise refusal("priority", priority)
    return priority


def waiting_of(sent: Callable[[str], Sequence[str]]) -> dict[str, Any]:
    """Returns the fields of a ClientRequest that the headers about waiting set.

    `sent` returns all values of the header with the given name. Raises BadRequest for an invalid
    value.
    """
    fields: dict[str, Any] = {}
    for value in (value.strip(" \t") for value in sent(DEADLINE_HEADER)):
        is_short = value.isascii() and value.isdigit() and len(value) <= len(str(DEADLINE_MAX_MS))
        if not (is_short and 1 <= int(value) <= DEADLINE_MAX_MS):
            raise BadRequest(
                f"the header {DEADLINE_HEADER} must be an integer from 1 to {DEADLINE_MAX_MS}"
            )
        fields["deadline_s"] = int(value) / 1000
    for value in (value.strip(" \t").lower() for value in sent(SHED_HEADER)):
        if value not in (*_YES, *_NO):
            raise BadRequest(f"the header {SHED_HEADER} must be 1 or 0")
        fields["may_shed"] = value in _YES
    return fields
