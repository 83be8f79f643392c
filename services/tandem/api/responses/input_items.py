"""Lists the input items of a kept response, page by page."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.api.responses.items import Item
from tandem.api.responses.store import input_item_id
from tandem.errors import BadRequest

_LIMIT, _LIMIT_MAX = 20, 100
_ORDERS = ("asc", "desc")
# item type -> prefix of the item's id
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def items_with_ids(items: Sequence[Item], request_id: str) -> list[dict[str, Any]]:
    """Formats the input items of a request as the API returns them, each with a new id."""
    return [
        {
            "id": input_item_id(_PREFIXES[item.type], request_id, index),
            "status": "completed",
            **item.model_dump(exclude_none=True),
        }
        for index, item in enumerate(items)
    ]


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of items that the query parameters select. Raises BadRequest if a parameter
    is malformed."""
    limit = query.get("limit", str(_LIMIT))
    order = query.get("order", "desc")
    if not re.fullmatch("[1-9][0-9]{0,2}", limit) or int(limit) > _LIMIT_MAX:
        raise BadRequest(
            f"limit must be an integer from 1 to {_LIMIT_MAX}; it is {limit[:40]!r}", param="limit"
        )
    if order not in _ORDERS:
        raise BadRequest(f"order must be asc or desc; it is {order[:40]!r}", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after := query.get("after", ""):
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise BadRequest(
                "the query parameter `after` must be the id of an input item; it is "
                f"{after[:80]!r}",
                param="after",
            )
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(ordered),
    }
