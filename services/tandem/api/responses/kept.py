"""A router's latest responses in its own memory.

`--responses-kept` is the maximum number of responses. A completed response is kept until a client
deletes it, until it is evicted, or until the router ends. `store.py` shares responses with other
routers, and uses these while Redis cannot be reached.

A tenant cannot see the responses of another tenant. If the number of responses is too large, the
oldest response of the tenant that has the most responses is evicted. If the total size is too
large, the oldest response of the tenant that has the most bytes is evicted. So the responses of a
tenant with few responses stay.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

# All kept responses together may have `num_max` times this many bytes. A single response may be
# larger.
_BYTES_EACH = 64 << 10
# The limit for all kept responses together is at least this many bytes, so that the largest
# possible response fits even if `num_max` is 1.
_BYTES_MIN = 32 << 20


def bytes_max_of(num_max: int) -> int:
    """Returns the limit on the bytes of `num_max` kept responses together."""
    return max(_BYTES_MIN, num_max * _BYTES_EACH)


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
    def conversation(self) -> list[dict[str, Any]]:
        """The chat messages of the whole conversation."""
        return msgspec.json.decode(self.messages, type=list[dict[str, Any]])

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items of the response and of its request, each with its id."""
        sent: list[dict[str, Any]] = msgspec.json.decode(self.input_items)
        return [*msgspec.json.decode(self.body)["output"], *sent]

    @property
    def items_bytes(self) -> int:
        """The bytes from which `items` is read."""
        return len(self.body) + len(self.input_items)

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
        self._bytes_max = bytes_max_of(num_max)
        self._shares: dict[str, _Share] = {}  # tenant -> responses of the tenant

    def keep(self, response_id: str, response: KeptResponse) -> None:
        """Keeps a response. Evicts old responses until no limit is exceeded."""
        share = self._shares.setdefault(response.tenant, _Share())
        share.responses[response_id] = response
        share.num_bytes += response.num_bytes
        while sum(len(s.responses) for s in self._shares.values()) > self._num_max:
            self._forget_oldest(max(self._shares, key=lambda t: len(self._shares[t].responses)))
        while sum(s.num_bytes for s in self._shares.values()) > self._bytes_max:
            self._forget_oldest(max(self._shares, key=lambda t: self._shares[t].num_bytes))

    def find(self, response_id: str) -> KeptResponse | None:
        """Returns a kept response of any tenant; None if it is not kept."""
        for share in self._shares.values():
            if response_id in share.responses:
                return share.responses[response_id]
        return None

    def delete(self, response_id: str) -> None:
        """Deletes a response, if it is kept."""
        if (found := self.find(response_id)) is not None:
            self._forget(found.tenant, response_id)

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._shares[tenant].responses)))

    def _forget(self, tenant: str, response_id: str) -> None:
        share = self._shares[tenant]
        share.num_bytes -= share.responses.pop(response_id).num_bytes
        if not share.responses:
            del self._shares[tenant]
