"""Runs SGLang's own tests of its OpenAI server against a running Tandem, and counts them by file.

    tandem up &
    python tests/conformance/run_sglang.py SOURCES [--url http://127.0.0.1:8000]

SOURCES is a checkout of SGLang; no line of it is in this repository. The tests are copied to a
temporary folder, with the name of the model that Tandem serves. Files and tests that do not apply
are in `sglang_not_applicable.toml`, with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import httpx
from suites import reason_of, run, table

HERE = Path(__file__).parent
FOLDER = "test/srt/openai_server"
# A test that names its model itself.
_MODEL = re.compile(r"(?<=\bmodel)( ?= ?)\"\w[\w.-]*/[\w.-]+\"")


def copy_tests(
    sources: Path, target: Path, model: str, only: str, not_applicable: dict[str, str]
) -> None:
    """Copies the files with tests that apply, for the served model."""
    for file in sorted((sources / FOLDER).rglob("*.py")):
        name = str(file.relative_to(sources / FOLDER))
        is_wanted = file.name == "__init__.py" or fnmatch.fnmatchcase(name, only)
        if reason_of(name, not_applicable) or not is_wanted:
            continue
        copy = target / "tests" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_MODEL.sub(rf'\1"{model}"', file.read_text()))


def main() -> None:
    """Reads the command line, runs the tests and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", default="*", help="a shell pattern of files")
    options = parser.parse_args()
    not_applicable = tomllib.loads((HERE / "sglang_not_applicable.toml").read_text())["reasons"]
    model = httpx.get(f"{options.url}/v1/models").json()["data"][0]["id"]
    target = Path(tempfile.mkdtemp(prefix="sglang-tests-"))
    try:
        copy_tests(options.sources, target, model, options.only, not_applicable)
        environment = {"TANDEM_URL": options.url, "TANDEM_MODEL": model}
        print(table(run(target, "sglang_plugin", not_applicable, environment)))
    finally:
        shutil.rmtree(target)


if __name__ == "__main__":
    main()
