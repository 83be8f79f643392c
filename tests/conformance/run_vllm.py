"""Runs vLLM's own tests of its OpenAI server against a running Tandem, and counts them by file.

    tandem up &
    python tests/conformance/run_vllm.py SOURCES [--url http://127.0.0.1:8000]

SOURCES is the unpacked source package of vLLM 0.11; no line of it is in this repository. The tests
are copied to a temporary folder, with the name of the model that Tandem serves. Files and tests
that do not apply are in `vllm_not_applicable.toml`, with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import httpx

from tandem.models.source import resolve

HERE = Path(__file__).parent
FOLDERS = ("tests/entrypoints/openai", "tests/v1/entrypoints/openai")
_MODEL = re.compile(r"\b(?:MODEL_NAME|model_name) = (\".*\")$", re.MULTILINE)


def copy_tests(
    sources: Path, target: Path, model: str, only: str, not_applicable: dict[str, str]
) -> None:
    """Copies the tests that apply, for the served model."""
    for folder in FOLDERS:
        files = [(sources / folder).parent / "conftest.py", *(sources / folder).rglob("*.py")]
        for file in sorted(files):
            name = str(file.relative_to(sources / "tests"))
            is_wanted = file.name == "conftest.py" or fnmatch.fnmatchcase(name, only)
            if _reason(name, not_applicable) or not is_wanted:
                continue
            copy = target / file.relative_to(sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text()
            for named in _MODEL.findall(text):
                text = text.replace(named, f'"{model}"')
            copy.write_text(text)
    for folder in [path for path in (target / "tests").rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    (target / "tests" / "__init__.py").touch()


def run(target: Path, url: str, version: str, not_applicable: dict[str, str]) -> Path:
    """Runs pytest there. Returns its report."""
    report = target / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "TANDEM_URL": url,
        "TANDEM_VERSION": version,
        "TANDEM_NOT_APPLICABLE": json.dumps(not_applicable),
        "TANDEM_TOKENIZER": str(resolve("smollm2").path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_plugin", "--tb=line"]
    command.append("--continue-on-collection-errors")
    command += ["-o", "asyncio_mode=strict", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    subprocess.run([*command, "--timeout=700", "tests"], cwd=target, env=environment, check=False)
    return report


def table(report: Path) -> str:
    """Returns the counts of each file, and two lines for each test that failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
        name = f"{file}::{case.get('name')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is not None:
            counts[file]["not applicable"] += 1
        elif problem is None:
            counts[file]["passed"] += 1
        else:
            counts[file]["failed"] += 1
            failed.append(f"{name}: {(problem.get('message') or '')[:300]}")
    kinds = ("passed", "failed", "not applicable")
    lines = [" ".join(f"{counts[file][k]:4} {k}," for k in kinds) + f" {file}" for file in counts]
    total: Counter[str] = sum(counts.values(), Counter())
    lines.append(" ".join(f"{total[k]:4} {k}," for k in kinds) + " of all")
    return "\n".join([*failed, "", *lines])


def _reason(name: str, not_applicable: dict[str, str]) -> str:
    return next((why for p, why in not_applicable.items() if fnmatch.fnmatchcase(name, p)), "")


def main() -> None:
    """Reads the command line, runs the tests and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", default="*", help="a shell pattern of files")
    options = parser.parse_args()
    not_applicable = tomllib.loads((HERE / "vllm_not_applicable.toml").read_text())["reasons"]
    model = httpx.get(f"{options.url}/v1/models").json()["data"][0]["id"]
    version = httpx.get(f"{options.url}/version").json()["version"]
    target = Path(tempfile.mkdtemp(prefix="vllm-tests-"))
    try:
        copy_tests(options.sources, target, model, options.only, not_applicable)
        print(table(run(target, options.url, version, not_applicable)))
    finally:
        shutil.rmtree(target)


if __name__ == "__main__":
    main()
