"""The screen of `tandem up` shows addresses and log lines as they are, not as markup."""

from __future__ import annotations

import pytest

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.launch.screen import LaunchScreen
from tandem.config.router import AdmissionOptions


def test_addresses_and_paths_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    options = LaunchOptions(host="fd00::1", admission=AdmissionOptions(allow_anonymous=True))
    screen = LaunchScreen(options)
    screen.done("model [a] and [/b]", 0.1)
    screen.show_ready("model", [], {}, "/logs/[x]", "tandem join [fd00::1]:8100")
    shown = capsys.readouterr().out
    assert shown.count("http://[fd00::1]:8000") == 3
    for text in ("model [a] and [/b]", "/logs/[x]", "  [fd00::1]:8001  ", "join [fd00::1]:8100"):
        assert text in shown
