"""The placement that an endpoint picker sends with a request, for the front that gets it. Pure.

The picker chose a decode worker, whose front the gateway sends the request to, and the prefill
worker that should compute the prompt. Both travel in one header, which the picker signs with the
cluster's token. A hint counts for one request id and for a short time: a client cannot make one,
and one that it saw places nothing but a request of the same id.

    x-tandem-placement-hint: BASE64URL(JSON).HEX(HMAC-SHA256)
"""

import base64
import binascii
import hashlib
import hmac

import msgspec

HINT_HEADER = "x-tandem-placement-hint"
AGE_MAX_S = 30.0  # also of clocks that differ
_CHARACTERS_MAX = 4096
_PURPOSE = b"tandem placement hint"  # keeps signatures of the token's other uses apart


class PlacementHint(msgspec.Struct, frozen=True):
    """A placement for one request. `prefill` is empty where the decode worker computes the prompt
    itself."""

    request_id: str  # of the header x-request-id
    at: float  # seconds since 1970
    decode: str  # worker id
    prefill: str = ""  # worker id


def sign(hint: PlacementHint, token: str) -> str:
    """Returns the header's value."""
    body = base64.urlsafe_b64encode(msgspec.json.encode(hint)).decode()
    return f"{body}.{_signature(body, token)}"


def read(value: str, token: str, *, request_id: str, now: float) -> PlacementHint | None:
    """Returns the hint; None if it is malformed, another's, of another request or too old."""
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
