"""`tandem keys`: an operator's calls to a router about API keys."""

import time
from pathlib import Path

import msgspec
from rich.table import Table

from tandem.cluster.operate import ask, console
from tandem.errors import OperateError
from tandem.security.keys import KeyRecord, Role, create

_PATH = "/v1/keys"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def create_key(url: str, tenant: str, role: str, expires: str) -> None:
    """Prints a new key. Raises OperateError."""
    body = {"tenant": tenant, "role": role, "expires_in_s": parse_duration(expires)}
    print(ask(url, "POST", body, path=_PATH)["key"])


def add_key(file: Path, tenant: str, role: Role, expires: str) -> None:
    """Prints a new key whose record is added to a file of records. Raises OperateError."""
    lifetime_s, now = parse_duration(expires), time.time()
    key = create(tenant, role, now=now, expires_at=now + lifetime_s if lifetime_s else 0.0)
    try:
        found = (
            msgspec.json.decode(file.read_bytes(), type=list[KeyRecord]) if file.exists() else []
        )
        file.write_bytes(msgspec.json.encode([*found, key.record]))
    except (OSError, msgspec.DecodeError) as error:
        raise OperateError(f"{file} cannot be read or written as a file of keys: {error}") from None
    print(key.text)


def list_keys(url: str) -> None:
    """Prints all keys, without their secrets. Raises OperateError."""
    columns = ("key", "tenant", "role", "state", "created", "expires")
    table = Table(*columns, box=None, pad_edge=False)
    for key in ask(url, "GET", path=_PATH)["keys"]:
        words = [key[name] for name in ("key_id", "tenant", "role", "state")]
        table.add_row(*words, _day(key["created_at"]), _day(key["expires_at"]))
    console().print(table)


def rotate_key(url: str, key_id: str, grace: str) -> None:
    """Prints the key with its new secret. Raises OperateError."""
    body = {"grace_s": parse_duration(grace)}
    print(ask(url, "POST", body, path=f"{_PATH}/{key_id}/rotate")["key"])


def revoke_key(url: str, key_id: str) -> bool:
    """Revokes a key, and prints who confirmed it. Returns whether all did. Raises OperateError."""
    done = ask(url, "POST", {}, path=f"{_PATH}/{key_id}/revoke")
    problems = {"redis": done["redis"], **done["routers"]}
    for name, problem in problems.items():
        print(f"{name}: {problem or 'confirmed'}")
    return not any(problems.values())


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 30d, 12h, 15m or 90s; 0 for never. Raises OperateError."""
    number, unit = text[:-1], text[-1:]
    if text == "0":
        return 0.0
    if unit not in _UNITS or not number.isdecimal():
        raise OperateError(f"{text!r} is no duration; give a number and a unit: 90s, 15m, 12h, 30d")
    return float(number) * _UNITS[unit]


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"
