# /// script
# dependencies = ["guidellm"]
# ///
"""GuideLLM: a benchmark of streamed chats with prompts that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import MODEL, run

NUM_REQUESTS = 4


def chats() -> None:
    url = os.environ["TANDEM_URL"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}"]
        command += ["--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += ["--tokenizer", f"kind=hf_auto,model={os.environ['TANDEM_TOKENIZER']}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=10"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
        assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
        (file,) = Path(folder).rglob("*.json")
        (told,) = json.loads(file.read_text())["benchmarks"]
        totals = told["metrics"]["request_totals"]
        assert totals["successful"] == NUM_REQUESTS, totals


run(chats)
