"""The limits in the record of an API key."""

from typing import Annotated, Any

import msgspec

from tandem.common.retention import PRIORITY_MAX, WEIGHT_DEFAULT
from tandem.errors import BadRequest

COUNT_MAX = 10**12  # largest allowed limit; counters in Redis's Lua scripts are exact up to 2^53
WEIGHT_MAX = 10_000

PRIORITY_MIN = -(2**31 - 1)  # earliest priority of a request

_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Priority = Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_MAX)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a key. 0 means no limit.

    The first three limits apply to the usage of the key's tenant, which is the total usage of all
    keys of the tenant at all routers.
    """

    requests_per_minute: _Count = 0
    tokens_per_minute: _Count = 0
    max_concurrent: _Count = 0
    max_prompt_tokens: _Count = 0
    max_completion_tokens: _Count = 0
    # Highest KV priority. A higher KV priority of a request is lowered to this value.
    max_kv_priority: _Priority = 0
    # Weight of the tenant in queues. A tenant with weight 2 gets twice as many turns as a tenant
    # with weight 1.
    weight: _Weight = WEIGHT_DEFAULT
    # Earliest (lowest) priority that a request may have in queues. An earlier one is raised to it.
    earliest_priority: Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=-PRIORITY_MIN)] = (
        PRIORITY_MIN
    )
    # Names of the models and LoRA adapters that the key may use. The name of a model allows its
    # adapters, too. Empty: all models.
    models: tuple[_Model, ...] = ()
    may_shed: bool = False  # True: all requests of the key may be refused while they wait

    @property
    def are_counted(self) -> bool:
        """True if one of the first three limits is not 0, so that the tenant's usage must be
        counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)


NO_LIMITS = Limits()


def changed(limits: Limits, changes: dict[str, Any]) -> Limits:
    """Returns a copy of `limits` with the new values in `changes`, which maps names of limits to
    values. Raises BadRequest for an unknown limit or an invalid value."""
    if unknown := set(changes) - set(Limits.__struct_fields__):
        raise BadRequest(
            f"{min(unknown)[:80]!r} is not the name of a limit; the names are "
            + ", ".join(Limits.__struct_fields__)
        )
    try:
        return msgspec.convert({**msgspec.to_builtins(limits), **changes}, Limits)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a limit has an invalid value: {error}") from None
