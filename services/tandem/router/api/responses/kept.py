"""Keeps the latest responses of a router, so that clients can read them and go on from them.

    --responses-kept 0 (the default): nothing is kept
    else: answered --> kept --> forgotten (deleted, or the oldest of too many, or the router ends)

In memory alone, and each router replica has its own. Another tenant's response does not exist.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import PreviousResponseNotFound, ResponseNotFound


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response. `messages` are those of the chat, the answer included, without instructions;
    `input_items` are the request's own."""

    tenant: str
    body: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    input_items: Sequence[dict[str, Any]]


class KeptResponses:
    """The latest `num_max` responses of a router."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._num_max > 0

    def keep(self, response: KeptResponse) -> None:
        """Keeps a response, and forgets the oldest of too many."""
        self._kept[response.body["id"]] = response
        while len(self._kept) > self._num_max:
            self._kept.popitem(last=False)

    def find(self, response_id: str, tenant: str) -> KeptResponse:
        """Returns a tenant's response. Raises ResponseNotFound."""
        found = self._kept.get(response_id)
        if found is None or found.tenant != tenant:
            raise ResponseNotFound(self._why(response_id), param="response_id")
        return found

    def messages_of(self, response_id: str | None, tenant: str) -> Sequence[dict[str, Any]]:
        """Returns the messages up to a response, if one is named. Raises
        PreviousResponseNotFound."""
        if response_id is None:
            return ()
        try:
            return self.find(response_id, tenant).messages
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(error.message, param="previous_response_id") from None

    def delete(self, response_id: str, tenant: str) -> None:
        """Forgets a tenant's response. Raises ResponseNotFound."""
        self.find(response_id, tenant)
        del self._kept[response_id]

    def is_of_another(self, response_id: str, tenant: str) -> bool:
        """Returns whether the response is kept here, and is not this tenant's."""
        found = self._kept.get(response_id)
        return found is not None and found.tenant != tenant

    def _why(self, response_id: str) -> str:
        keeps = f"it keeps the last {self._num_max} of its own; another replica may know it"
        if not self.is_on:
            keeps = "it keeps none (--responses-kept)"
        # OpenAI's words begin it: clients look for them.
        found = f"Response with id {response_id[:80]!r} not found."
        return f"{found} This router does not know it: {keeps}"
