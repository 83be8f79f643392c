"""Finds the name of the session that a request continues, such as a conversation of an agent.

The first name in this order counts:

  name                                  sent by
  headers in SESSION_HEADERS            agents and gateways, over gRPC as metadata
  metadata.user_id of a message         Claude Code
  prompt_cache_key                      clients of OpenAI

A later turn of a session is placed where its KV is (`placement/choose.py`), and the sessions of a
tenant take turns while workers are busy (`admission/fair_queue.py`).
"""

import json
from collections.abc import Callable, Sequence

from tandem.errors import BadRequest

# In the order in which they count. Some systems write a new correlation id into each request, so
# this header is the last.
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
    "x-correlation-id",
)
_SESSION_CHARACTERS_MAX = 256
_IN_USER_ID = "_session_"


def session_of(sent: Callable[[str], Sequence[str]]) -> str:
    """Returns the session that the headers name; "" if they name none.

    `sent` returns all values of the header with the given name. An empty one counts as absent.
    Raises BadRequest for an invalid value.
    """
    values = ((name, value.strip(" \t")) for name in SESSION_HEADERS for value in sent(name))
    named = [(name, value) for name, value in values if value]
    for name, value in named:
        is_printable = value.isascii() and value.isprintable()
        if not is_printable or len(value) > _SESSION_CHARACTERS_MAX:
            raise BadRequest(
                f"the header {name} must have 1 to {_SESSION_CHARACTERS_MAX} printable ASCII "
                "characters"
            )
    return named[0][1] if named else ""


def session_in_user_id(user_id: object) -> str:
    """Returns the session in the field `metadata.user_id` of Anthropic's API; "" if there is none.

    Versions of Claude Code write `user_..._account_..._session_ID` or a JSON object with the key
    `session_id`.
    """
    if not isinstance(user_id, str) or len(user_id) > 4 * _SESSION_CHARACTERS_MAX:
        return ""
    if not user_id.startswith("{"):
        return user_id.rpartition(_IN_USER_ID)[2] if _IN_USER_ID in user_id else ""
    try:
        session = json.loads(user_id).get("session_id")
    except (ValueError, RecursionError):
        return ""
    return session if isinstance(session, str) else ""
