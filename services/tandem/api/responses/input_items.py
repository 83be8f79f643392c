"""Formats the input items of a kept response."""

from collections.abc import Sequence
from typing import Any

from tandem.api.responses.items import Item
from tandem.api.responses.store import input_item_id

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
