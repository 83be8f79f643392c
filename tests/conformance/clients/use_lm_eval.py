# /// script
# dependencies = ["lm_eval[api]", "transformers"]
# ///
"""LM Evaluation Harness: log probabilities of completions and of chats' texts, on its own task."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import MODEL, URL, run

_CHOICE = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: ["Paris", "Rome"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
_GENERATED = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{country}}?"
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
filter_list:
- name: found
  filter: [{function: regex, regex_pattern: "(Paris|Rome)"}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""
_ROWS = [
    {"country": "France", "capital": "Paris", "label": 0},
    {"country": "Italy", "capital": "Rome", "label": 1},
]


def _measured(model: str, path: str, task: str, config: str, *more: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
        (folder / f"{task}.yaml").write_text(config % rows)
        served = f"model={MODEL},base_url={URL}/{path},num_concurrent=2"
        served += f",tokenizer={os.environ['TANDEM_TOKENIZER']}"
        command = ["lm_eval", "run", "--model", model, "--model_args", served, "--tasks", task]
        command += ["--include_path", name, "--output_path", f"{name}/out", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-300:]
        (file,) = (folder / "out").rglob("results_*.json")
        found = json.loads(file.read_text())["results"][task]
        return next(v for k, v in found.items() if k.startswith(("acc,", "exact_match,")))


def log_probabilities() -> None:
    assert _measured("local-completions", "completions", "capitals", _CHOICE) == 1.0


def chats() -> None:
    path = "chat/completions"
    more = ("--apply_chat_template",)
    assert _measured("local-chat-completions", path, "answers", _GENERATED, *more) >= 0.5


run(log_probabilities, chats)
