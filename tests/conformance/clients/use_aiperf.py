# /// script
# dependencies = ["aiperf"]
# ///
"""AIPerf: a benchmark of streamed chats, and one of completions."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import MODEL, run

NUM_REQUESTS = 4


def _profile(endpoint: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["aiperf", "profile", "--model", MODEL, "--url", os.environ["TANDEM_URL"]]
        command += ["--endpoint-type", endpoint, "--tokenizer", os.environ["TANDEM_TOKENIZER"]]
        command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
        command += ["--isl", "50", "--osl", "10", "--ui", "none", "--artifact-dir", folder, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
        (file,) = Path(folder).rglob("profile_export_aiperf.json")
        told = json.loads(file.read_text())
        assert told["request_count"]["avg"] == NUM_REQUESTS, told
        assert not told.get("error_summary"), told["error_summary"]


def chats() -> None:
    _profile("chat", "--streaming")


def completions() -> None:
    _profile("completions")


run(chats, completions)
