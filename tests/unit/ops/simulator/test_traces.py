from __future__ import annotations

from pathlib import Path

import pytest

from tandem.ops.simulator.traces import (
    DAY_S,
    Arrival,
    TraceError,
    lay_on_day,
    read_trace,
    rename_prefixes,
    repeat,
    scale_load,
    shift_time,
    span_s,
    spread_bursts,
)

DATA = Path(__file__).parents[3] / "data"
MOONCAKE = DATA / "mooncake_small.jsonl"
AZURE = DATA / "azure_small.csv"


def test_reads_mooncakes_requests() -> None:
    arrivals = read_trace(MOONCAKE)
    assert [a.at_s for a in arrivals] == [0, 0, 3, 3, 3, 6]
    assert (arrivals[0].num_tokens, arrivals[0].output_tokens) == (1100, 5)
    assert arrivals[0].block_hashes()[0] == arrivals[1].block_hashes()[0]
    assert arrivals[0].block_hashes()[1] != arrivals[1].block_hashes()[1]


def test_reads_azures_requests_which_share_nothing() -> None:
    arrivals = read_trace(AZURE)
    assert [a.num_tokens for a in arrivals] == [374, 1396, 879]
    assert [a.output_tokens for a in arrivals] == [44, 109, 55]
    assert arrivals[1].at_s == pytest.approx(4.314579, abs=1e-6)
    assert [len(a.block_ids) for a in arrivals] == [1, 3, 2]
    assert len({h for a in arrivals for h in a.block_hashes()}) == 6


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("t.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', 1),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}', 1),
        ("t.jsonl", "{", 1),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1", 2),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1", 2),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, line: int) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=f"{name}:{line}: "):
        read_trace(tmp_path / name)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(tmp_path / "t.jsonl")


def test_bursts_are_spread_up_to_the_next_one_in_order() -> None:
    arrivals = read_trace(MOONCAKE)
    spread = spread_bursts(arrivals, seed=1)
    times = [a.at_s for a in spread]
    assert times == sorted(times)
    assert [a.block_ids for a in spread] == [a.block_ids for a in arrivals]
    assert all(0 <= t < 3 for t in times[:2])
    assert all(3 <= t < 6 for t in times[2:5])
    assert len(set(times)) == 6
    assert spread_bursts(arrivals, seed=1) == spread
    assert spread_bursts(arrivals, seed=2) != spread


def test_load_and_time_change_nothing_else() -> None:
    arrivals = read_trace(MOONCAKE)
    assert [a.at_s for a in scale_load(arrivals, 2.0)] == [0, 0, 1.5, 1.5, 1.5, 3]
    shifted = shift_time(arrivals, 3.0)
    assert [a.block_ids for a in shifted[:4]] == [a.block_ids for a in arrivals[2:]]
    assert {a.block_ids for a in shifted[4:]} == {a.block_ids for a in arrivals[:2]}
    assert shifted[0].at_s == 0
    assert shifted[-1].at_s < span_s(arrivals)


def test_renamed_prefixes_are_others_and_shared_alike() -> None:
    arrivals = read_trace(MOONCAKE)
    renamed = rename_prefixes(arrivals, "x")
    names = [
        {h: i for i, h in enumerate(dict.fromkeys(hashes))}
        for hashes in (
            [h for a in arrivals for h in a.block_hashes()],
            [h for a in renamed for h in a.block_hashes()],
        )
    ]
    assert not names[0].keys() & names[1].keys()
    for one, other in zip(arrivals, renamed, strict=True):
        assert [names[0][h] for h in one.block_hashes()] == [
            names[1][h] for h in other.block_hashes()
        ]


def test_copies_share_no_prefix_with_one_another() -> None:
    arrivals = read_trace(MOONCAKE)
    many = repeat(arrivals, 15, seed=0)
    assert len(many) == 15
    assert [a.at_s for a in many] == sorted(a.at_s for a in many)
    assert max(a.at_s for a in many) < span_s(arrivals)
    assert len({a.salt for a in many}) == 3
    assert repeat(arrivals, 4, seed=0) == arrivals[:4]


def test_a_trace_on_a_day_has_the_days_rates_and_its_own_bursts() -> None:
    trace = [Arrival(float(n), 100, 10, (n,)) for n in range(1000)]
    day = lay_on_day(trace, 24_000, (1.0,) * 12 + (3.0,) * 12)

    assert len(day) == 24_000
    assert all(0 <= a.at_s <= DAY_S for a in day)
    assert [a.at_s for a in day] == sorted(a.at_s for a in day)
    night = sum(3 * 3600 <= a.at_s < 9 * 3600 for a in day)
    noon = sum(15 * 3600 <= a.at_s < 21 * 3600 for a in day)
    assert noon == pytest.approx(3 * night, rel=0.01)
    assert len({a.block_hashes()[0] for a in day}) == 24_000  # copies share no prefix


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"trace.jsonl is not a text file"):
        read_trace(tmp_path / "trace.jsonl")
