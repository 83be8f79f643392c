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
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import httpx
from suites import reason_of, run, table

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
            if reason_of(name, not_applicable) or not is_wanted:
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
        environment = {"TANDEM_URL": options.url, "TANDEM_VERSION": version}
        print(table(run(target, "vllm_plugin", not_applicable, environment)))
    finally:
        shutil.rmtree(target)


if __name__ == "__main__":
    main()
