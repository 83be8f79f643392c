"""The `tandem keys` commands, which manage API keys through a router."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from rich.table import Table

from tandem.cluster.operate import call_with_progress, console
from tandem.common.options import to_text
from tandem.common.units import parse_time
from tandem.errors import OperateError
from tandem.net.security.keys import KeyRecord, Role, create
from tandem.net.security.limits import NO_LIMITS, changed

_PATH = "/v1/keys"


def create_key(url: str, tenant: str, role: str, expires: str, limits: dict[str, Any]) -> None:
    """Creates a key and prints it. Raises OperateError."""
    body = {
        "tenant": tenant,
        "role": role,
        "expires_in_s": parse_duration(expires),
        "limits": limits,
    }
    print(call_with_progress(url, "POST", body, path=_PATH)["key"])


def add_key(file: Path, tenant: str, role: Role, expires: str, limits: dict[str, Any]) -> None:
    """Creates a key, appends its record to the JSON file of key records, and prints the key. Raises
    OperateError."""
    lifetime_s = parse_duration(expires)
    now = time.time()
    expires_at = now + lifetime_s if lifetime_s else 0.0
    key = create(tenant, role, now=now, expires_at=expires_at, limits=changed(NO_LIMITS, limits))
    try:
        found = (
            msgspec.json.decode(file.read_bytes(), type=list[KeyRecord]) if file.exists() else []
        )
        file.write_bytes(msgspec.json.encode([*found, key.record]))
    except (OSError, msgspec.DecodeError) as error:
        raise OperateError(
            f"no key can be added to {file}, which must be a JSON file of API keys: {error}"
        ) from None
    print(key.text)


def list_keys(url: str) -> None:
    """Prints all keys without their secrets. Raises OperateError."""
    columns = ("key", "tenant", "role", "state", "created", "expires", "limits")
    table = Table(*columns, box=None, pad_edge=False)
    for key in call_with_progress(url, "GET", path=_PATH)["keys"]:
        words = [key[name] for name in ("key_id", "tenant", "role", "state")]
        limits = " ".join(f"{name}={to_text(value)}" for name, value in key["limits"].items())
        table.add_row(*words, _day(key["created_at"]), _day(key["expires_at"]), limits)
    console().print(table)


def update_key(url: str, key_id: str, limits: dict[str, Any]) -> None:
    """Changes limits of a key and prints all its limits. Raises OperateError."""
    if not limits:
        raise OperateError("name a limit to change, such as --requests-per-minute 60")
    key = call_with_progress(url, "POST", {"limits": limits}, path=f"{_PATH}/{key_id}/update")
    for name, value in key["limits"].items():
        print(f"{name}: {to_text(value)}")
    if not key["limits"]:
        print("the key has no limits")


def show_usage(url: str, window: str, last: int, tenant: str | None) -> None:
    """Prints each tenant's usage in each of the `last` most recent days or minutes; `window` is
    "day" or "minute". Raises OperateError."""
    query = {"window": window, "last": last} | ({} if tenant is None else {"tenant": tenant})
    rows = call_with_progress(url, "GET", path=f"/v1/usage?{urlencode(query)}")["data"]
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    table = Table(window, "tenant", *counts, box=None, pad_edge=False)
    for row in rows:
        start = _day(row["start"]).removesuffix(" 00:00" if window == "day" else "")
        table.add_row(start, row["tenant"] or "-", *(str(row[name]) for name in counts))
    console().print(table)


def rotate_key(url: str, key_id: str, grace: str) -> None:
    """Gives a key a new secret and prints the key. The old secret stays valid for `grace`. Raises
    OperateError."""
    body = {"grace_s": parse_duration(grace)}
    print(call_with_progress(url, "POST", body, path=f"{_PATH}/{key_id}/rotate")["key"])


def revoke_key(url: str, key_id: str) -> bool:
    """Revokes a key and prints which processes confirmed it. Returns True if all did. Raises
    OperateError."""
    done = call_with_progress(url, "POST", {}, path=f"{_PATH}/{key_id}/revoke")
    problems = {"redis": done["redis"], **done["routers"]}
    for name, problem in problems.items():
        print(f"{name}: {problem or 'revocation confirmed'}")
    return not any(problems.values())


def parse_duration(text: str) -> float:
    """Parses a duration such as 30d, 12h, 15m or 90s. Returns seconds; 0 for "0". Raises
    OperateError."""
    has_unit = text[:1].isdecimal() and text[-1:].isalpha()
    with suppress(ValueError):
        if has_unit or text == "0":
            return parse_time(text)
    raise OperateError(f"{text!r} is not a duration; give a number and a unit: 90s, 15m, 12h, 30d")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"
