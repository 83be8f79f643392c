"""Keeps a router's latest responses, so that clients can read them and continue conversations.

  --responses-kept 0 (the default): nothing is kept
  otherwise: answered --> kept --> removed (deleted, evicted, or the router ended)

Responses are kept in memory, separately in each router replica. A tenant cannot see those of
another. When there are too many responses or bytes, the oldest response of the tenant with the most
is evicted, so no tenant can evict another's small share.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from tandem.errors import PreviousResponseNotFound, ResponseNotFound

_BYTES_EACH = 64 << 10  # average size of a response; larger ones fit while the total does
# minimum for all responses together, so that the largest response always fits
_BYTES_MIN = 32 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, encoded as JSON. `messages` are those of the chat with the answer but without
    instructions; `input_items` are those of this request only."""

    tenant: str
    body: bytes
    messages: bytes
    input_items: bytes

    @classmethod
    def of(
        cls,
        tenant: str,
        body: dict[str, Any],
        messages: Sequence[dict[str, Any]],
        input_items: Sequence[dict[str, Any]],
    ) -> Self:
        return cls(tenant, *map(msgspec.json.encode, (body, messages, input_items)))

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages) + len(self.input_items)


@dataclass(slots=True)
class _Share:
    """The kept responses of one tenant, oldest first."""

    responses: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class KeptResponses:
    """The latest `num_max` responses of a router."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._bytes_max = max(_BYTES_MIN, num_max * _BYTES_EACH)
        self._shares: dict[str, _Share] = {}  # keyed by tenant

    @property
    def is_on(self) -> bool:
        return self._num_max > 0

    def keep(self, response_id: str, response: KeptResponse) -> None:
        """Keeps a response, and evicts others while a limit is exceeded."""
        share = self._shares.setdefault(response.tenant, _Share())
        share.responses[response_id] = response
        share.num_bytes += response.num_bytes
        while sum(len(s.responses) for s in self._shares.values()) > self._num_max:
            self._forget_oldest(max(self._shares, key=lambda t: len(self._shares[t].responses)))
        while sum(s.num_bytes for s in self._shares.values()) > self._bytes_max:
            self._forget_oldest(max(self._shares, key=lambda t: self._shares[t].num_bytes))

    def find(self, response_id: str, tenant: str) -> KeptResponse:
        """Finds a response of the tenant. Raises ResponseNotFound."""
        share = self._shares.get(tenant)
        if share is None or response_id not in share.responses:
            raise ResponseNotFound(self._why(response_id), param="response_id")
        return share.responses[response_id]

    def messages_of(self, response_id: str | None, tenant: str) -> Sequence[dict[str, Any]]:
        """Returns the messages up to and including a response; none if `response_id` is None.
        Raises PreviousResponseNotFound."""
        if response_id is None:
            return ()
        try:
            found = self.find(response_id, tenant)
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(error.message, param="previous_response_id") from None
        return msgspec.json.decode(found.messages, type=list[dict[str, Any]])

    def delete(self, response_id: str, tenant: str) -> None:
        """Deletes a response of the tenant. Raises ResponseNotFound."""
        self.find(response_id, tenant)
        self._forget(tenant, response_id)

    def is_of_another(self, response_id: str, tenant: str) -> bool:
        """Says whether another tenant has a kept response with this id."""
        return any(
            response_id in share.responses
            for owner, share in self._shares.items()
            if owner != tenant
        )

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._shares[tenant].responses)))

    def _forget(self, tenant: str, response_id: str) -> None:
        share = self._shares[tenant]
        share.num_bytes -= share.responses.pop(response_id).num_bytes
        if not share.responses:
            del self._shares[tenant]

    def _why(self, response_id: str) -> str:
        keeps = f"it keeps the last {self._num_max} of its own; another replica may know it"
        if not self.is_on:
            keeps = "it keeps none (--responses-kept)"
        # Starts with OpenAI's wording, which some clients match.
        found = f"Response with id {response_id[:80]!r} not found."
        return f"{found} This router does not know it: {keeps}"
