"""Runs copies of another project's tests with a plug-in of ours, and counts them by file."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from tandem.models.source import resolve

HERE = Path(__file__).parent
TIMEOUT_S = 700


def reason_of(name: str, not_applicable: dict[str, str]) -> str:
    """Returns why a file or a test does not apply; "" if it does."""
    return next((why for p, why in not_applicable.items() if fnmatch.fnmatchcase(name, p)), "")


def run(
    target: Path, plugin: str, not_applicable: dict[str, str], environment: dict[str, str]
) -> Path:
    """Runs pytest on the folder `tests` of `target`. Returns its report."""
    report = target / "report.xml"
    all_of_it = {
        **os.environ,
        **environment,
        "PYTHONPATH": str(HERE),
        "TANDEM_NOT_APPLICABLE": json.dumps(not_applicable),
        "TANDEM_TOKENIZER": str(resolve("smollm2").path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "--tb=line"]
    command.append("--continue-on-collection-errors")
    command += ["-o", "asyncio_mode=strict", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command += [f"--timeout={TIMEOUT_S}", "tests"]
    subprocess.run(command, cwd=target, env=all_of_it, check=False)
    return report


def table(report: Path) -> str:
    """Returns two lines for each test that failed, and the counts of each file."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/") + ".py"
        file = case.get("file", module).removeprefix("tests/")
        kind = case.get("classname", "").rpartition(".")[2]
        of_class = "" if kind == Path(file).stem else f"::{kind}"
        name = f"{file}{of_class}::{case.get('name')}"
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
