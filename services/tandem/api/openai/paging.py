"""Query parameters of lists in OpenAI's API."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import BadRequest

_ORDERS = ("asc", "desc")


def limit_of(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Returns the parameter `limit`. Raises BadRequest."""
    limit = query.get("limit", str(default))
    if not re.fullmatch("[1-9][0-9]{0,5}", limit) or int(limit) > most:
        raise BadRequest(
            f"limit must be an integer from 1 to {most}; it is {limit[:40]!r}", param="limit"
        )
    return int(limit)


def order_of(query: Mapping[str, str]) -> str:
    """Returns the parameter `order`, asc or desc. Raises BadRequest."""
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise BadRequest(f"order must be asc or desc; it is {order[:40]!r}", param="order")
    return order


def page_of(
    items: Sequence[dict[str, Any]],
    query: Mapping[str, str],
    *,
    what: str,
    default: int = 20,
    most: int = 100,
) -> dict[str, Any]:
    """Returns the page that the parameters `limit`, `order` and `after` select. `items` are oldest
    first, and `what` is what they are, for errors. Raises BadRequest."""
    limit = limit_of(query, default=default, most=most)
    ordered = list(items) if order_of(query) == "asc" else list(reversed(items))
    if after := query.get("after", ""):
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise BadRequest(
                f"the query parameter `after` must be the id of {what}; it is {after[:80]!r}",
                param="after",
            )
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return list_reply(page, has_more=len(page) < len(ordered))


def list_reply(page: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }
