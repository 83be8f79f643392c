"""Keeps a router's latest responses, so that clients can read them and continue conversations.

`--responses-kept` is the maximum number of responses, which is 0 by default. A completed response
is kept until a client deletes it, until it is evicted, or until the router ends.

Responses are kept in memory, separately in each router replica. A tenant cannot see the responses
of another tenant. If the number of responses is too large, the router evicts the oldest response
of the tenant that has the most responses. If the total size is too large, the router evicts the
oldest response of the tenant that has the most bytes. So the responses of a tenant with few
responses stay.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from tandem.errors import PreviousResponseNotFound, ResponseNotFound

# All kept responses together may have `num_max` times this many bytes. A single response may be
# larger.
_BYTES_EACH = 64 << 10
# The limit for all kept responses together is at least this many bytes, so that the largest
# possible response fits even if `num_max` is 1.
_BYTES_MIN = 32 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the data that a client needs to continue its conversation. Fields of the type
    `bytes` contain JSON."""

    tenant: str
    body: bytes
    # chat messages of the whole conversation, including this answer but not `instructions`
    messages: bytes
    # input items of this request, without those of earlier requests of the conversation
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
    """The kept responses of one tenant, by response id, oldest first."""

    responses: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class KeptResponses:
    """The latest `num_max` responses of a router."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._bytes_max = max(_BYTES_MIN, num_max * _BYTES_EACH)
        self._shares: dict[str, _Share] = {}  # tenant -> responses of the tenant

    @property
    def is_on(self) -> bool:
        return self._num_max > 0

    def keep(self, response_id: str, response: KeptResponse) -> None:
        """Keeps a response. Evicts old responses until no limit is exceeded."""
        share = self._shares.setdefault(response.tenant, _Share())
        share.responses[response_id] = response
        share.num_bytes += response.num_bytes
        while sum(len(s.responses) for s in self._shares.values()) > self._num_max:
            self._forget_oldest(max(self._shares, key=lambda t: len(self._shares[t].responses)))
        while sum(s.num_bytes for s in self._shares.values()) > self._bytes_max:
            self._forget_oldest(max(self._shares, key=lambda t: self._shares[t].num_bytes))

    def find(self, response_id: str, tenant: str) -> KeptResponse:
        """Returns a kept response of the tenant. Raises ResponseNotFound."""
        share = self._shares.get(tenant)
        if share is None or response_id not in share.responses:
            raise ResponseNotFound(self._why(response_id), param="response_id")
        return share.responses[response_id]

    def messages_of(self, response_id: str | None, tenant: str) -> Sequence[dict[str, Any]]:
        """Returns the chat messages of the conversation that ends with this response, or () if
        `response_id` is None. Raises PreviousResponseNotFound."""
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
        """Returns True if another tenant has a kept response with this id."""
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
        keeps = f"only its last {self._num_max} responses; another router replica may have it"
        if not self.is_on:
            keeps = "no responses (--responses-kept 0)"
        # The message starts with OpenAI's exact wording, which some clients search for.
        found = f"Response with id {response_id[:80]!r} not found."
        return f"{found} This router keeps {keeps}"
