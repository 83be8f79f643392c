"""Signs and reads placement hints, which name the workers chosen for a request. Does no I/O.

With a Kubernetes gateway, an endpoint picker chooses the decode worker and the prefill worker of a
request. It writes both into a request header, the hint, and signs the hint with the cluster's
token. The gateway sends the request to the decode worker's front, which is a router beside this
worker. The front reads the hint.
    x-tandem-placement-hint: BASE64URL(JSON).HEX(HMAC-SHA256)
A client cannot create a hint, because it lacks the token. A copied hint is of no use for another
request, because a hint is valid only for one request id and a short time.
"""

import base64
import binascii
import hashlib
import hmac

import msgspec

HINT_HEADER = "x-tandem-placement-hint"
AGE_MAX_S = 30.0  # longest validity of a hint, including the difference between hosts' clocks
_CHARACTERS_MAX = 4096
_PURPOSE = b"tandem placement hint"  # is signed too; other uses of the token sign another text


class PlacementHint(msgspec.Struct, frozen=True):
    """A placement for one request. `prefill` is "" if the decode worker computes the prompt."""

    request_id: str  # value of the header x-request-id
    at: float  # time when the hint was made, in seconds since 1970
    decode: str  # worker id
    prefill: str = ""  # worker id


def sign(hint: PlacementHint, token: str) -> str:
    """Returns the value of the header `HINT_HEADER`, signed with the cluster's token."""
    body = base64.urlsafe_b64encode(msgspec.json.encode(hint)).decode()
    return f"{body}.{_signature(body, token)}"


def read(value: str, token: str, *, request_id: str, now: float) -> PlacementHint | None:
    """Returns the hint in the header's value.

    Returns None if the hint is malformed, too old, wrongly signed or for another request.
    """
    body, _, signature = value.partition(".")
    if len(value) > _CHARACTERS_MAX or not value.isascii():
        return None
    if not hmac.compare_digest(signature.encode(), _signature(body, token).encode()):
        return None
    try:
        hint = msgspec.json.decode(base64.urlsafe_b64decode(body), type=PlacementHint)
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_fresh = abs(now - hint.at) <= AGE_MAX_S
    return hint if is_fresh and hint.request_id == request_id else None


def _signature(body: str, token: str) -> str:
    return hmac.new(token.encode(), _PURPOSE + body.encode(), hashlib.sha256).hexdigest()
