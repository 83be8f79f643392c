"""Sizes and times as people write them: `4GiB`, `500MB`, `90s`, `5m`."""

import math
import re

_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\d+(?:\.\d+)?"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z]*)")
_TIME = re.compile(rf"({_NUMBER})\s*(ms|s|m|h|d)\s*")


def parse_size(text: str) -> int:
    """Parses a number of bytes, or a number with a unit: kB, MB, GB and TB are powers of 1000, KiB,
    MiB, GiB and TiB are powers of 1024. Raises ValueError with a message for users."""
    try:
        return int(text)
    except ValueError:
        found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _SIZES:
        raise ValueError(
            f'"{text}" is not a size; write a number of bytes, or a size such as 500MB or 4GiB'
        )
    return round(float(found[1]) * _SIZES[found[2]])


def parse_time(text: str) -> float:
    """Parses a number of seconds, or numbers with units: 250ms, 90s, 5m, 1h30m, 2d. Returns
    seconds. Raises ValueError with a message for users."""
    try:
        return float(text)
    except ValueError:
        parts = _TIME.findall(text)
    if not parts or _TIME.sub("", text).strip():
        raise ValueError(
            f'"{text}" is not a time; write a number of seconds, or a time such as 90s, 5m or 1h30m'
        )
    return math.fsum(float(number) * _TIMES[unit] for number, unit in parts)


def format_size(num_bytes: int) -> str:
    """Writes a size in the largest binary unit that needs no fraction: 1073741824 is 1GiB."""
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{prefix}iB"
    return str(num_bytes)


def format_ms(ms: float) -> str:
    """Writes a duration in milliseconds such as `1.9 s`, `85 ms` or `0.4 ms`."""
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def format_time(seconds: float) -> str:
    """Writes a time in seconds, such as 0.1s; 0 has no unit."""
    return f"{seconds:.15g}s" if seconds else "0"
