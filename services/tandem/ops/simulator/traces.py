"""Reads and transforms request traces: Mooncake's JSONL and Azure's CSV.

As in Mooncake's traces, an integer stands for the text of a block: two prompts that begin with the
same integers begin with the same text. A copy of a trace gets another `salt`, so the copied prompts
differ from the original ones. All randomness comes from a seed.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from itertools import accumulate, count, groupby, islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

BLOCK_SIZE = 512  # tokens of a block in Mooncake's traces
DAY_S = 86_400.0
# Request rate of a service used by people, in each hour of a day from midnight on. The rate is low
# at night and has two peaks. Only the ratios between the numbers matter.
DAY = (
    *(0.45, 0.34, 0.27, 0.23, 0.22, 0.25, 0.35, 0.55, 0.8, 1.1, 1.35, 1.45),
    *(1.4, 1.4, 1.5, 1.6, 1.55, 1.45, 1.3, 1.25, 1.25, 1.15, 0.9, 0.65),
)


class TraceError(ValueError):
    """A trace cannot be read. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    num_tokens: int  # prompt tokens
    output_tokens: int
    # One id for each block of the prompt. Two prompts with the same id have the same text up to the
    # end of this block.
    block_ids: tuple[int, ...] = ()
    salt: bytes = b""
    in_session: bool = False  # True: a later request will probably extend this prompt
    tenant: str = ""
    session: str = ""
    priority: int = 0  # lower is earlier

    def block_hashes(self) -> list[bytes]:
        """Returns a unique name for each block of the prompt: the salt and the block id."""
        return [self.salt + block_id.to_bytes(8, "big") for block_id in self.block_ids]

    def block_digests(self) -> list[bytes]:
        """Returns a 16-byte hash for each block of the prompt. The tiers' policies count blocks in
        a count-min sketch (frequency_sketch.py), which needs uniformly distributed bytes."""
        return [blake2b(name, digest_size=16).digest() for name in self.block_hashes()]


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace. Arrivals are sorted and start at 0 s. Raises TraceError or OSError."""
    arrivals = _read_rows(path)
    if not arrivals:
        raise TraceError(f"{path} has no requests")
    first_s = min(a.at_s for a in arrivals)
    arrivals = [replace(a, at_s=a.at_s - first_s) for a in arrivals]
    return sorted(arrivals, key=lambda a: a.at_s)


def spread_bursts(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Spreads requests that arrive at the same time over the interval until the next arrivals, at
    random times. The order of the requests does not change.

    In Mooncake's traces, for example, about 10 requests arrive together every 3 s.
    """
    rng = Random(f"spread {seed}")
    bursts = [list(burst) for _, burst in groupby(arrivals, key=lambda a: a.at_s)]
    starts = [burst[0].at_s for burst in bursts]
    gaps = [later - start for start, later in pairwise(starts)]
    last_gap_s = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    spread: list[Arrival] = []
    for burst, gap_s in zip(bursts, [*gaps, last_gap_s], strict=True):
        if len(burst) == 1:
            spread += burst
            continue
        times = sorted(burst[0].at_s + gap_s * rng.random() for _ in burst)
        spread += [replace(a, at_s=t) for a, t in zip(burst, times, strict=True)]
    return spread


def scale_load(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Returns the same requests with the arrival rate multiplied by `factor`."""
    return [replace(a, at_s=a.at_s / factor) for a in arrivals]


def shift_time(arrivals: Sequence[Arrival], shift_s: float) -> list[Arrival]:
    """Cuts the first `shift_s` seconds from the start of the trace and appends them at the end."""
    period_s = span_s(arrivals)
    moved = [replace(a, at_s=(a.at_s - shift_s) % period_s) for a in arrivals]
    return sorted(moved, key=lambda a: a.at_s)


def rename_prefixes(arrivals: Sequence[Arrival], name: str) -> list[Arrival]:
    """Returns the same requests with other prompts. The new prompts share prefixes with each other
    as the old prompts did. A new and an old prompt have no common prefix."""
    salt = name.encode() + b"/"
    return [replace(a, salt=salt) for a in arrivals]


def repeat(arrivals: Sequence[Arrival], num_requests: int, seed: int) -> list[Arrival]:
    """Returns `num_requests` requests in the time span of the trace. If the trace has fewer
    requests, copies with other prompts (`rename_prefixes`) and shifted times are added."""
    rng = Random(f"repeat {seed}")
    copies = list(arrivals)
    for number in range(1, -(-num_requests // len(arrivals))):
        shift_s = rng.uniform(0, span_s(arrivals))
        copies += rename_prefixes(shift_time(arrivals, shift_s), f"copy {number}")
    return sorted(copies, key=lambda a: a.at_s)[:num_requests]


def lay_on_day(
    arrivals: Sequence[Arrival], num_requests: int, hours: Sequence[float] = DAY, *, seed: int = 0
) -> list[Arrival]:
    """Distributes `num_requests` requests over 24 hours. `hours` has the relative request rate of
    each hour: with [1, 3, ...] the second hour has about three times as many requests as the first.
    Between the middles of two hours the rate changes linearly.

    If the trace has fewer requests, copies with other prompts follow it. The times between requests
    are stretched or compressed to give the rate. Bursts of requests remain bursts.
    """
    period_s = span_s(arrivals)
    copies: list[Arrival] = []
    for number in range(-(-num_requests // len(arrivals))):
        renamed = rename_prefixes(arrivals, f"day {seed} {number}") if number else arrivals
        copies += [replace(a, at_s=a.at_s + number * period_s) for a in renamed]
    del copies[num_requests:]
    # Each minute of the day has a weight, and `until[m]` is the sum of the first m weights. The
    # last loop moves each request. For example, a request in the middle of the trace moves to the
    # minute at which `until` reaches half of the sum of all weights.
    num_hours = len(hours)
    weights = []
    for minute in range(num_hours * 60):
        at = (minute + 0.5) / 60 - 0.5
        low = math.floor(at)
        weights.append(
            hours[low % num_hours]
            + (at - low) * (hours[(low + 1) % num_hours] - hours[low % num_hours])
        )
    until = list(accumulate(weights, initial=0.0))
    minute_s = DAY_S / len(weights)
    trace_s = span_s(copies)
    laid = []
    minute = 0
    for arrival in copies:
        share = arrival.at_s / trace_s * until[-1]
        while until[minute + 1] < share:
            minute += 1
        within = (share - until[minute]) / weights[minute]
        laid.append(replace(arrival, at_s=(minute + within) * minute_s))
    return laid


def span_s(arrivals: Sequence[Arrival]) -> float:
    """Returns the length of the trace in seconds: the time of the last arrival plus the mean time
    between two arrivals. The length is never 0."""
    last_s = arrivals[-1].at_s
    return last_s + (last_s / (len(arrivals) - 1) if last_s else 1.0)


def _read_rows(path: Path) -> list[Arrival]:
    try:
        return _read_lines(path)
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not a text file in UTF-8") from None


def _read_lines(path: Path) -> list[Arrival]:
    arrivals = []
    next_ids = count()
    is_azure = path.suffix == ".csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows: Iterable[Any] = csv.DictReader(file) if is_azure else file
        for number, row in enumerate(rows, 2 if is_azure else 1):
            try:
                if is_azure:
                    arrivals.append(_read_azure(row, next_ids))
                elif row.strip():
                    arrivals.append(_read_mooncake(json.loads(row)))
            except (ValueError, KeyError, TypeError) as error:
                kind = "an Azure" if is_azure else "a Mooncake"
                raise TraceError(
                    f"{path}:{number}: the line is not a request of {kind} trace: {_why(error)}"
                ) from error
    return arrivals


def _why(error: Exception) -> str:
    """Returns a sentence that says why a line of a trace cannot be read."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, json.JSONDecodeError):
        return "it is not JSON"
    return str(error)


def _read_mooncake(row: dict[str, Any]) -> Arrival:
    return Arrival(
        at_s=row["timestamp"] / 1000,
        num_tokens=_positive(row["input_length"]),
        output_tokens=_positive(row["output_length"]),
        block_ids=tuple(map(int, row["hash_ids"])),
        in_session=bool(row.get("session_id")),
        tenant=str(row.get("tenant") or ""),
        session=str(row.get("session_id") or ""),
        priority=int(row.get("priority") or 0),
    )


def _read_azure(row: dict[str, str], next_ids: Iterator[int]) -> Arrival:
    """Reads a request of Azure's trace. This trace has no information about common prefixes, so
    each prompt gets block ids of its own."""
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]) - datetime(2000, 1, 1)
    num_tokens = _positive(row["ContextTokens"])
    output_tokens = _positive(row["GeneratedTokens"])
    block_ids = tuple(islice(next_ids, -(-num_tokens // BLOCK_SIZE)))
    return Arrival(at.total_seconds(), num_tokens, output_tokens, block_ids)


def _positive(value: object) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError(f"the prompt or the answer has {number} tokens; both must have at least 1")
    return number
