"""The screen of `tandem up` shows addresses and log lines as they are, not as markup."""

from __future__ import annotations

import pytest

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.pools import Member
from tandem.common.config.router import AdmissionOptions
from tandem.common.worker_load import WorkerLoad
from tandem.net.store.registry import KvCompatibility, WorkerRecord


def decode_worker(kernels: str, worker_id: str = "decode-0", num_ranks: int = 1) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        epoch="e",
        role="decode",
        state="ready",
        address="",
        metrics_address="",
        host="h",
        pid=1,
        model="m",
        max_model_len=100,
        compatibility=KvCompatibility("m", "bfloat16+blocks", "fast", 16, "bfloat16", "l", 1),
        load=WorkerLoad(blocks_total=2000),
        kernels=kernels,
        num_ranks=num_ranks,
    )


MEMBERS = [
    Member("prefill-0", "prefill", ordinal=0, cores=[0]),
    Member("decode-0", "decode", ordinal=1, cores=[1]),
]


def test_addresses_and_paths_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    options = LaunchOptions(host="fd00::1", admission=AdmissionOptions(allow_anonymous=True))
    screen = LaunchScreen(options)
    screen.done("model [a] and [/b]", 0.1)
    screen.show_ready("model", MEMBERS, [], "/logs/[x]", "tandem join [fd00::1]:8100")
    shown = capsys.readouterr().out
    assert shown.count("http://[fd00::1]:8000") == 2
    for text in ("model [a] and [/b]", "/logs/[x]", "gRPC [fd00::1]:8001", "join [fd00::1]:8100"):
        assert text in shown


def test_the_summary_has_what_a_person_needs_in_15_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = LaunchScreen(LaunchOptions())
    records = [decode_worker("native (avx512)")]
    screen.show_ready("m", MEMBERS, records, "/logs", "tandem join 10.0.0.1:8100")
    shown = capsys.readouterr().out
    assert len(shown.strip().splitlines()) <= 15
    for text in (
        "with 1 decode and 1 prefill workers",
        "m, computed in bfloat16",
        "kernels  compiled C++ (avx512)",
        "room for 32,000 tokens",
        "http://127.0.0.1:8000/v1",
        "tandem chat",
        "curl http://127.0.0.1:8000/v1/chat/completions",
    ):
        assert text in shown


def test_the_ranks_of_workers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    screen = LaunchScreen(LaunchOptions())
    several = decode_worker("native (avx2)", "decode-0", num_ranks=2)
    screen.show_ready("m", MEMBERS, [several], "/logs")
    assert "  kernels  compiled C++ (avx2), 2 ranks per worker\n" in capsys.readouterr().out
    screen.show_ready("m", MEMBERS, [several, decode_worker("native (avx2)", "decode-1")], "/logs")
    shown = capsys.readouterr().out
    assert "  kernels  compiled C++ (avx2) on decode-1\n" in shown
    assert "  kernels  compiled C++ (avx2), 2 ranks per worker on decode-0\n" in shown


def test_plain_torch_and_missing_decode_workers_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = LaunchScreen(LaunchOptions())
    screen.show_ready("m", MEMBERS, [decode_worker("torch")], "/logs")
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "plain torch" in x]
    assert "\x1b[33m" in line, "yellow"
    screen.show_ready("m", [], [], "/logs")
    shown = capsys.readouterr().out
    assert "ready" not in shown
    assert "no request is served: there is no decode worker" in shown


def test_no_chat_is_suggested_for_a_model_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    screen = LaunchScreen(LaunchOptions())
    screen.show_ready("m", MEMBERS, [], "/logs", generates=False)
    shown = capsys.readouterr().out
    assert "tandem chat" not in shown
    assert "/v1/models lists its tasks" in shown
