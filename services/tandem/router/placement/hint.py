"""Signs and reads placement hints, which name the workers chosen for a request. Does no I/O.

With a Kubernetes gateway, an endpoint picker chooses the decode worker and the prefill worker of a
request. The picker writes the ids of both workers into a request header, the hint, and signs the
hint with the cluster's token:
    x-tandem-placement-hint: BASE64URL(JSON).HEX(HMAC-SHA256)
The gateway sends the request to a router in the pod of the chosen decode worker. This router reads
the hint and places the request accordingly.
A client cannot create a hint, because the client does not know the cluster's token. A copied hint
is of no use for another request, because a hint is valid only for one request id and a short time.
"""

import base64
import binascii
import hashlib
import hmac

import msgspec

HINT_HEADER = "x-tandem-placement-hint"
# A hint is valid for this many seconds. The hosts' clocks may differ by a few of these seconds.
AGE_MAX_S = 30.0
_CHARACTERS_MAX = 4096
# This text is signed with the hint, so that no other signature by the same token is a valid hint.
_PURPOSE = b"tandem placement hint"


class PlacementHint(msgspec.Struct, frozen=True):
    """A placement for one request. `prefill` is "" if the decode worker computes the prompt."""

    request_id: str  # value of the header x-request-id
    at: float  # time when the hint was made, in seconds since 1970
    decode: str  # id of the decode worker
    prefill: str = ""  # id of the prefill worker


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
