"""Runs unchanged client libraries and benchmark programs against a running Tandem.

    tandem up &
    python tests/conformance/run_clients.py [--url http://127.0.0.1:8000] [--only use_l*]

Each file of `clients/` names its dependencies (PEP 723). The newest versions of them are installed
into an environment of their own, outside the repository. Ends with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

import httpx

from tandem.models.source import resolve

CLIENTS = Path(__file__).parent / "clients"
_HEADER = re.compile(r"^# /// script\n(.*?)^# ///$", re.MULTILINE | re.DOTALL)


def dependencies_of(client: Path) -> list[str]:
    """Returns what the client's header says to install."""
    found = _HEADER.search(client.read_text())
    assert found is not None, f"{client.name} names no dependencies"
    named: list[str] = tomllib.loads(found[1].replace("# ", ""))["dependencies"]
    return named


def install(client: Path, folder: Path) -> Path:
    """Returns the Python of the client's own environment, which is made unless it is there."""
    home = folder / client.stem
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "-q", *dependencies_of(client)]
        subprocess.run(command, check=True)
        (home / "installed").touch()
    return python


def versions(client: Path, python: Path) -> str:
    """Returns the installed version of what the client's header names."""
    names = [name.partition("[")[0] for name in dependencies_of(client)]
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run(
        [str(python), "-c", code, *names], capture_output=True, text=True, check=True
    )
    pairs = zip(names, done.stdout.split(), strict=True)
    return ", ".join(f"{name} {version}" for name, version in pairs)


def check(client: Path, python: Path, url: str, model: str) -> list[str]:
    """Returns a line for each check, and one if the program ended early."""
    env = {
        **os.environ,
        "TANDEM_URL": url,
        "TANDEM_MODEL": model,
        "TANDEM_TOKENIZER": str(resolve("smollm2").path),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    command = [str(python), str(client)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    lines = [n for n in done.stdout.splitlines() if n.startswith(("passed ", "failed "))]
    is_explained = any(line.startswith("failed ") for line in lines)
    if done.returncode and not is_explained:
        lines.append(f"failed at its start or end: {done.stderr.strip()[-300:]}")
    return lines


def main() -> None:
    """Reads the command line, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", default="*", help="a shell pattern of clients")
    folder = Path(tempfile.gettempdir()) / "tandem-clients"
    parser.add_argument("--environments", type=Path, default=folder, help="kept between runs")
    asked = parser.parse_args()
    model = httpx.get(f"{asked.url}/v1/models").json()["data"][0]["id"]
    num_failed = 0
    for client in sorted(CLIENTS.glob("use_*.py")):
        if not fnmatch.fnmatchcase(client.stem, asked.only):
            continue
        python = install(client, asked.environments)
        lines = check(client, python, asked.url, model)
        failed = [line for line in lines if line.startswith("failed ")]
        num_failed += len(failed)
        num_passed = len(lines) - len(failed)
        named = versions(client, python)
        print(f"{named}: {num_passed} of {len(lines)} passed", flush=True)
        for line in failed:
            print(f"  {line}", flush=True)
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main()
