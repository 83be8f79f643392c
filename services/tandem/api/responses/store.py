"""Keeps responses, so that clients can read them, continue conversations and refer to their items.

Responses are kept in Redis, so that every router of the cluster has them. While Redis cannot be
reached, a router has those that it made itself.
"""

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.api.responses.kept import KeptResponse, KeptResponses
from tandem.api.responses.shared import SharedResponses
from tandem.errors import (
    BadRequest,
    BodyTooLarge,
    ItemNotFound,
    PreviousResponseNotFound,
    ResponseNotDeleted,
    ResponseNotFound,
)
from tandem.net.store.client import UNREACHABLE, UNREADABLE, Client

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
# After Redis has not answered, responses are looked for in this router only, for this time.
# Otherwise a request that refers to many responses would wait for each of them.
_AWAY_S = 1.0
_REFERRED_MAX = 256  # one request may refer to the items of this many responses
# The responses to which one request refers may have this many times the bytes of the largest body.
_READ_FACTOR = 4
# The id of an item has the id of its request, which the id of the response has, too.
_ITEM_ID = re.compile("[a-z]{2,4}_([0-9a-f]{32})_(in)?[0-9]{1,6}")


def input_item_id(prefix: str, request_id: str, index: int) -> str:
    """Returns the id of an item in the input of a request."""
    return f"{prefix}_{request_id}_in{index}"


class ResponseStore:
    """The latest `num_max` responses of a cluster."""

    def __init__(self, redis: Client, cluster_id: str, num_max: int, body_bytes_max: int) -> None:
        """`body_bytes_max` is the limit of a request's body."""
        self._num_max = num_max
        self._body_bytes_max = body_bytes_max
        self._own = KeptResponses(num_max)
        self._shared = SharedResponses(redis, cluster_id, num_max)
        # ids of own responses that are not in Redis, because it could not be reached
        self._unshared: set[str] = set()
        self._away_until = 0.0

    @property
    def is_on(self) -> bool:
        return self._num_max > 0

    async def keep(self, response_id: str, response: KeptResponse) -> None:
        """Keeps a response. Evicts old responses until no limit is exceeded."""
        self._own.keep(response_id, response)
        try:
            await self._shared.keep(response_id, response)
        except UNREACHABLE as error:
            log.warning("response %s is kept only by this router: %r", response_id, error)
            self._unshared = {name for name in self._unshared if self._own.find(name) is not None}
            self._unshared.add(response_id)

    async def find(self, response_id: str, tenant: str) -> KeptResponse:
        """Returns a kept response of the tenant. Raises ResponseNotFound."""
        found = await self._find(response_id)
        if found is None or found.tenant != tenant:
            # The message starts with OpenAI's exact wording, which some clients search for.
            raise ResponseNotFound(
                f"Response with id {response_id[:80]!r} not found. {self._keeps}",
                param="response_id",
            )
        return found

    async def messages_of(self, response_id: str | None, tenant: str) -> Sequence[dict[str, Any]]:
        """Returns the chat messages of the conversation that ends with this response, or () if
        `response_id` is None. Raises PreviousResponseNotFound."""
        if response_id is None:
            return ()
        try:
            return (await self.find(response_id, tenant)).conversation
        except ResponseNotFound as error:
            raise PreviousResponseNotFound(error.message, param="previous_response_id") from None

    async def delete(self, response_id: str, tenant: str) -> None:
        """Deletes a response of the tenant. Raises ResponseNotFound, and ResponseNotDeleted if
        Redis may still have the response and does not answer."""
        await self.find(response_id, tenant)
        try:
            await self._shared.delete(response_id)
        except UNREACHABLE as error:
            if response_id not in self._unshared:
                log.warning("response %s could not be deleted in Redis: %r", response_id, error)
                raise ResponseNotDeleted(
                    f"response {response_id[:80]!r} is not deleted, because the router cannot "
                    "reach Redis, which has it; try again later",
                    retry_after_s=_RETRY_AFTER_S,
                ) from error
        self._own.delete(response_id)

    async def is_of_another(self, response_id: str, tenant: str) -> bool:
        """Returns True if another tenant has a kept response with this id."""
        found = await self._find(response_id)
        return found is not None and found.tenant != tenant

    async def put_items(self, body: dict[str, Any], tenant: str) -> None:
        """Replaces each `item_reference` in the input of a body by the item of a kept response.
        Raises ItemNotFound if the tenant has no such item. Raises BadRequest for an item that is
        named twice, for too many responses, and if the items make the body too large."""
        items = body.get("input")
        if not isinstance(items, list) or not any(map(_is_reference, items)):
            return
        kept: dict[str, dict[str, Any]] = {}  # item id -> item, of all responses that were read
        read: set[str] = set()  # ids of these responses
        put: set[str] = set()  # ids of the items that were put
        left = _READ_FACTOR * self._body_bytes_max  # bytes of responses that may still be read
        room = self._body_bytes_max  # bytes that the items may still have
        for place, item in enumerate(items):
            if not _is_reference(item):
                continue
            item_id = item["id"]
            if item_id in put:
                # These are OpenAI's first words, too.
                raise BadRequest(
                    f"Duplicate item found with id {item_id[:80]!r}. Name each item once",
                    param="input",
                )
            put.add(item_id)
            made_in = _ITEM_ID.fullmatch(item_id)
            response_id = f"resp_{made_in[1]}" if made_in else ""
            if response_id and response_id not in read:
                read.add(response_id)
                found = await self._find(response_id)
                if found is not None and found.tenant == tenant:
                    left -= found.items_bytes
                    if len(read) > _REFERRED_MAX or left < 0:
                        raise BadRequest(
                            "input refers to items of too many or too large responses; one request "
                            f"may refer to {_REFERRED_MAX} responses with "
                            f"{_READ_FACTOR * self._body_bytes_max} bytes together",
                            param="input",
                        )
                    kept |= {each["id"]: each for each in found.items}
            if item_id not in kept:
                # These are OpenAI's first words, too.
                raise ItemNotFound(
                    f"Item with id {item_id[:80]!r} not found. {self._keeps}. Send the item itself",
                    param="input",
                )
            room -= len(msgspec.json.encode(kept[item_id]))
            if room < 0:
                raise BodyTooLarge(
                    f"the items to which input refers must have at most {self._body_bytes_max} "
                    "bytes together, which is the limit of a body"
                )
            items[place] = kept[item_id]

    async def _find(self, response_id: str) -> KeptResponse | None:
        if time.monotonic() < self._away_until:
            return self._own.find(response_id)
        try:
            found = await self._shared.find(response_id)
        except (*UNREACHABLE, *UNREADABLE) as error:
            log.warning("response %s is looked for in this router only: %r", response_id, error)
            self._away_until = time.monotonic() + _AWAY_S
            return self._own.find(response_id)
        if found is None and response_id in self._unshared:
            return self._own.find(response_id)
        return found

    @property
    def _keeps(self) -> str:
        if not self.is_on:
            return "This cluster keeps no responses (--responses-kept 0)"
        return f"This cluster keeps only its last {self._num_max} responses"


def _is_reference(item: object) -> bool:
    """Returns whether an item is an `item_reference`, of which the type may be left out."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)
