"""Tables of workers and of the audit trail: whole on a wide screen, and legible in 80 columns."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from tandem.cluster.tables import (
    audit_tables,
    duration,
    placed_whys,
    waiting_pools,
    worker_tables,
)


def worker(worker_id: str, peers: int = 2) -> dict[str, Any]:
    load = {"num_running": 3, "num_waiting": 0, "queued_tokens": 512, "blocks_total": 1456}
    return {
        "worker_id": worker_id,
        "role": "decode",
        "state": "ready",
        "compatible": True,
        "started_at": time.time() - 7300,
        "load": load,
        "kv_use": 0.5,
        "rates": {"decode_step_ms": 1.0, "decode_sequence_ms": 2.0, "prefill_tokens_per_s": 1000},
        "transports": {f"prefill-{n}": "nixl" for n in range(peers)},
        "pairs": {"prefill-0": {"bytes_per_s": 1.6e9}},
    }


def shown(width: int, parts_of: Any, *data: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    for part in parts_of(*data, screen):
        screen.print(part)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


NOTE = "its process 21459 is stopped (SIGSTOP) [really]; it has written nothing for 3 s"
KNOWN = [
    {"worker_id": "decode-0", "pool": "decode", "state": "silent", "note": NOTE},
    {"worker_id": "decode-1", "pool": "decode", "state": "loading", "note": ""},
]


def test_a_wide_screen_shows_one_row_for_each_worker() -> None:
    lines = shown(300, worker_tables, [worker("decode-0")], KNOWN).splitlines()
    assert len(lines) == 4, "the header has two lines"
    assert NOTE in lines[2]
    assert "1000 tok/s, 1+2n ms" in lines[2]
    assert "prefill-0 nixl 1.6 GB/s, prefill-1 nixl" in lines[2]


def test_in_80_columns_nothing_is_broken_or_lost() -> None:
    text = shown(80, worker_tables, [worker("decode-0"), worker("prefill-10", 0)], KNOWN)
    assert "…" not in text
    words = text.split()
    assert " ".join(words).count(NOTE) == 1
    for name in ("decode-0", "decode-1", "prefill-10", "prefill-0 nixl 1.6 GB/s", "2 h", "50% of"):
        assert name in text
    assert "prefill-0 nixl 1.6 GB/s," not in text  # a line for each peer


def test_requests_are_counted_at_their_decode_worker() -> None:
    busy = worker("decode-0")
    busy["load"] |= {"num_prefilling": 1, "num_pulls": 4, "num_waiting": 2}
    peer = worker("prefill-0") | {"role": "prefill"}
    only_prefills = worker("prefill-1") | {"role": "prefill"}
    only_prefills["load"] |= {"num_running": 0}
    workers = [busy, peer, only_prefills]
    decode, prefill, other = shown(300, worker_tables, workers, []).splitlines()[2:5]
    assert decode.split()[5:9] == ["2", "7", "512", "50%"], "2 of 3 running decode; 1 + 4 + 2"
    assert prefill.split()[5:8] == ["3", "-", "512"], "it decodes, too"
    assert other.split()[5:8] == ["-", "-", "512"]
    old = shown(300, worker_tables, [worker("decode-0")], []).splitlines()[2]
    assert old.split()[5:7] == ["3", "0"], "an older worker tells less"


@pytest.mark.parametrize("width", [300, 80])
def test_what_tiers_hold_has_a_column_if_a_worker_has_one(width: int) -> None:
    tiers = [("host", 1000, 250), ("disk", 64_000, 0), ("store", 65_536, 1234)]
    names = ("name", "blocks_total", "blocks_held")
    tiered = worker("decode-0") | {"tiers": [dict(zip(names, t, strict=True)) for t in tiers]}
    text = shown(width, worker_tables, [tiered, worker("decode-1")], [])
    told = " ".join(text.split())
    for words in ("KV in tiers measured", "host 25% of 1000", "disk 0% of 64000", "store 1234"):
        assert words in told
    without = shown(width, worker_tables, [worker("decode-0") | {"tiers": []}], [])
    assert "tiers" not in without


@pytest.mark.parametrize("width", [300, 80])
def test_ranks_have_a_column_if_a_worker_has_several(width: int) -> None:
    several = worker("decode-0") | {"num_ranks": 4}
    lines = shown(width, worker_tables, [several, worker("decode-1")], []).splitlines()
    (header,) = [line for line in lines if "ranks" in line]
    at = header.index("ranks")
    cells = [line[at : at + 5].strip() for line in lines[lines.index(header) + 1 :]]
    assert [cell for cell in cells if cell] == ["4", "1"]
    single = worker("decode-0") | {"num_ranks": 1}
    assert "ranks" not in shown(width, worker_tables, [single], [])


def test_the_audit_trail_in_80_columns_has_each_entry_whole() -> None:
    why = "prefill must be an integer from 0 to 64, the wanted size of the pool and nothing else"
    entry = {
        "at": 1.8e9,
        "router_id": "router-0",
        "caller": {"address": "127.0.0.1:1 over HTTP", "key_id": "k1", "tenant": "acme"},
        "what": "sizes",
        "before": "prefill=1",
        "after": "prefill=1000",
        "outcome": "invalid_request",
        "why": why,
    }
    text = " ".join(shown(80, audit_tables, [entry]).split())
    assert f"sizes: prefill=1 -> prefill=1000: invalid_request: {why}" in text
    assert "127.0.0.1:1 over HTTP, key k1 of acme" in text
    assert len(shown(300, audit_tables, [entry]).splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0 s"), (119, "119 s"), (301, "5 min"), (7200, "2 h"), (1e6, "12 d")]
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_process_that_was_kept_from_far_hosts_says_so() -> None:
    plain = {"id": "prefill-0", "state": "running", "host": "host-b"}
    near = {"id": "prefill-1", "state": "running", "host": "host-a", "placed_why": "host-b is far"}
    pools = {"prefill": {"agents": [plain, near, {**near, "state": "lost"}]}, "decode": {}}
    assert placed_whys(pools) == ["prefill-1 runs on host-a, because host-b is far"]


def test_a_pool_that_waits_says_why_unless_the_headline_does() -> None:
    pools = {"prefill": {"wanted": 1}, "decode": {"waits_why": "no GPU is free"}}
    assert waiting_pools({"pools": pools}) == ["the decode pool waits for a GPU: no GPU is free"]
    assert waiting_pools({"pools": pools, "headline": "The decode pool ...: no GPU is free."}) == []
