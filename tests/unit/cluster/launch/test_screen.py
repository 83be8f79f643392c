"""The screen of `tandem up` shows addresses and log lines as they are, not as markup."""

from __future__ import annotations

import pytest

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.screen import LaunchScreen
from tandem.cluster.pools import Member
from tandem.common.config.router import AdmissionOptions


def test_addresses_and_paths_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    options = LaunchOptions(host="fd00::1", admission=AdmissionOptions(allow_anonymous=True))
    screen = LaunchScreen(options)
    screen.done("model [a] and [/b]", 0.1)
    screen.show_ready("model", [], "/logs/[x]", "tandem join [fd00::1]:8100")
    shown = capsys.readouterr().out
    assert shown.count("http://[fd00::1]:8000") == 3
    for text in ("model [a] and [/b]", "/logs/[x]", "  [fd00::1]:8001  ", "join [fd00::1]:8100"):
        assert text in shown


def test_a_column_names_gpus_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    screen = LaunchScreen(LaunchOptions())
    workers = [
        Member("prefill-0", "prefill", ordinal=0, core=0, gpu=3),
        Member("decode-0", "decode", ordinal=1, core=1, gpu=5),
    ]
    screen.show_ready("model", workers, "/logs")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["worker", "role", "core", "GPU"] in lines
    assert ["decode-0", "decode", "1", "5"] in lines
