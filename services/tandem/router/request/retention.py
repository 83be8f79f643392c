"""Converts clients' fields and headers to the retention of a request's KV.

field, header or answer                  effect
prompt_cache_key, a session (session.py)  the prompt is treated as likely to be sent again
prompt_cache_retention, cache_control    the blocks are pinned for some time after the request ends
kv_priority                              order of eviction from tiers with the policy `priority`
an answer with tool calls                the blocks are pinned while the tool runs (keeper.py)
"""

from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, Retention
from tandem.router.request.allowed import KEY_CHARACTERS_MAX, refusal

# Values of OpenAI's prompt_cache_retention -> seconds for which the KV is pinned. Some clients of
# OpenAI write "in_memory" with a hyphen.
RETENTIONS_S = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}
TTLS_S = {"5m": 300.0, "1h": 3600.0}  # values of Anthropic's cache_control -> seconds of a pin


def asked_retention(
    retention: str | None, key: str | None, priority: int = PRIORITY_DEFAULT
) -> Retention:
    """Returns the retention that OpenAI's fields and `kv_priority` request.

    Raises BadRequest for values that are not allowed.
    """
    if retention is not None and retention not in RETENTIONS_S:
        raise refusal("prompt_cache_retention", retention)
    if key is not None and len(key) > KEY_CHARACTERS_MAX:
        raise refusal("prompt_cache_key", why=f"{len(key)} characters long")
    if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise refusal("kv_priority", priority)
    pin_s = RETENTIONS_S[retention] if retention is not None else 0.0
    return Retention(bool(key), pin_s, priority=priority)
