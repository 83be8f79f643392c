# /// script
# dependencies = ["llm"]
# ///
"""The command `llm`: chats, streams, a conversation that goes on, schemas and tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, QUESTION, URL, run

_HOME = Path(tempfile.mkdtemp())
_MODEL = f"""
- model_id: tandem
  model_name: {MODEL}
  api_base: "{URL}"
  supports_tools: true
  supports_schema: true
"""


def _llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    env = {**os.environ, "LLM_USER_PATH": str(_HOME), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chats() -> None:
    answer = _llm("-m", "tandem", "-o", "temperature", "0", "--no-stream", QUESTION)
    assert "Paris" in answer


def streams() -> None:
    assert "Paris" in _llm("-m", "tandem", "-o", "temperature", "0", QUESTION)


def goes_on() -> None:
    assert _llm("-c", "-o", "max_tokens", "40", "And of Italy?")


def structures() -> None:
    found = _llm("-m", "tandem", "--schema", "name, age int", "Ann is 30.")
    assert json.loads(found).keys() >= {"name", "age"}


def offers_tools() -> None:
    assert _llm("-m", "tandem", "-T", "llm_version", "-o", "max_tokens", "60", "Say hello.")


(_HOME / "extra-openai-models.yaml").write_text(_MODEL)
run(chats, streams, goes_on, structures, offers_tools)
