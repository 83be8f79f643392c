"""Installs Tandem into .venv: `install.py runtime` for users, `install.py dev` for developers.

The Makefile runs this program with the Python that .venv has or will have. The program checks the
machine before it changes anything, and ends with one line that says what to do if something is
missing. It needs only the standard library.

uv installs the packages if it is installed, and pip otherwise. The compiler works meanwhile,
because the CPU kernels need no package. A package of the lock must have one of the lock's hashes.
torch is not in the lock, because its build depends on the machine: without a GPU it is the CPU
build, if an index that has it is reached. Such an index is one of pip's configuration, torch's own,
whose address uv knows, or the one whose URL is in the environment variable TORCH_INDEX.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PYTHONS = ((3, 11), (3, 14))  # the first and the last version for which the locks have packages
GLIBC_MIN = (2, 31)  # oldest C library with which all wheels of the locks work
# Bytes that .venv takes, with a margin, and those that pip needs for temporary files.
VENV_BYTES = {"runtime": 2_200_000_000, "dev": 4_500_000_000}
TEMPORARY_BYTES = 600_000_000
# Bytes that CUDA's libraries add to .venv, and to pip's temporary files.
CUDA_BYTES = 4_500_000_000
CUDA_TEMPORARY_BYTES = 3_000_000_000
CACHE_BYTES = 50_000_000  # for compiled objects and the converted tokenizer of the built-in model
EXPECTED = {"runtime": "about a minute", "dev": "about three minutes"}
_SIZE_TIMEOUT_S = 5.0


class InstallError(Exception):
    """Tandem cannot be installed. The message is one line that says what to do."""


def main() -> int:
    kind = sys.argv[1]
    os.chdir(ROOT)
    try:
        check_machine(kind)
        _Install(kind).run()
    except InstallError as error:
        print(f"Tandem cannot be installed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check_machine(kind: str) -> None:
    """Raises InstallError if something is missing. Creates the cache folder and nothing else."""
    check_python(sys.version_info[:2])
    check_system(sys.platform, platform.machine(), glibc_version())
    is_new = not any(VENV.glob("installed-*"))
    if is_new:
        check_disk(ROOT, VENV_BYTES[kind])
    check_temporary(TEMPORARY_BYTES if is_new and not shutil.which("uv") else 0)
    sys.path.insert(0, str(ROOT / "kernels"))
    import native_build

    check_cache(native_build.cache_root())
    try:
        native_build.check()
    except native_build.BuildError as error:
        raise InstallError(str(error)) from None


def check_python(version: tuple[int, ...]) -> None:
    first, last = PYTHONS
    if not first <= version <= last:
        raise InstallError(
            f"it needs Python {first[0]}.{first[1]} to {last[0]}.{last[1]}, and "
            f"{sys.executable} is {version[0]}.{version[1]}; name another: make PYTHON=PATH"
        )


def check_system(system: str, machine: str, glibc: tuple[int, ...]) -> None:
    if system != "linux":
        raise InstallError(
            f"it runs on Linux only, and this is {system}; use a Linux machine or a container "
            "(docs/install.md)"
        )
    if machine not in ("x86_64", "aarch64"):
        raise InstallError(f"its packages exist for x86-64 and arm64, and this is {machine}")
    if glibc < GLIBC_MIN:
        found = f"glibc {glibc[0]}.{glibc[1]}" if glibc else "another C library"
        raise InstallError(
            f"its packages need glibc {GLIBC_MIN[0]}.{GLIBC_MIN[1]} or newer, and this system has "
            f"{found}; use Debian 11, Ubuntu 20.04 or a newer system, or a container of one"
        )


def glibc_version() -> tuple[int, ...]:
    """Returns the version of the GNU C library; () on a system with another C library."""
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
        return tuple(int(part) for part in version.split(".")[:2])
    except (OSError, ValueError):
        return ()


def check_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InstallError(
            f"the cache folder {folder} cannot be written ({error.strerror}); "
            "name another folder in the variable TANDEM_CACHE_DIR"
        ) from None
    if free < CACHE_BYTES:
        raise InstallError(
            f"the disk of the cache folder {folder} has {free / 1e6:.0f} MB free, and "
            f"{CACHE_BYTES / 1e6:.0f} MB are needed; free some space, or name a folder on another "
            "disk in the variable TANDEM_CACHE_DIR"
        )


def check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InstallError(
            f"the disk of {folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are "
            "needed; free some space, or clone the repository to another disk"
        )


def check_temporary(needed: int) -> None:
    """Checks the disk of pip's temporary files."""
    try:
        folder = tempfile.gettempdir()
    except OSError:
        raise InstallError(
            "no folder for temporary files can be written; name one in the variable TMPDIR"
        ) from None
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InstallError(
            f"the disk of {folder} has {free / 1e9:.1f} GB free, and temporary files take "
            f"{needed / 1e9:.1f} GB; name a folder on another disk in the variable TMPDIR"
        )


def has_gpu() -> bool:
    """Returns True if NVIDIA's driver is there."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


class _Failed(Exception):
    """A program ended with an error. The message is the most important line of its output."""


class _Install:
    """One installation: its clock, and the program that installs packages."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._began = time.monotonic()
        self._uv = shutil.which("uv")

    def run(self) -> None:
        by = "uv" if self._uv else "pip"
        self._stage(
            f"1 of 3: downloading and unpacking packages with {by}, {EXPECTED[self._kind]}; "
            "compiling the CPU kernels meanwhile"
        )
        environment = dict(os.environ)
        if self._kind == "dev":
            environment["TANDEM_NATIVE"] = "all"  # tests compare the instruction sets
        compiling = subprocess.Popen([sys.executable, "kernels/native_build.py"], env=environment)
        try:
            self._make_environment()
            self._install_packages()
            self._stage("2 of 3: waiting for the compiler, at most a minute")
            if compiling.wait():
                raise InstallError(
                    "the CPU kernels cannot be compiled; the compiler's output is above"
                )
        finally:
            compiling.kill()
        self._stage("3 of 3: installing Tandem, about 10 s")
        self._install("--no-deps", "--no-build-isolation", "-e", ".", environment=environment)
        self._stage("installed")

    def _install_packages(self) -> None:
        is_new = not any(
            VENV.glob(f"lib/python*/site-packages/torch-{_torch_version()}*.dist-info")
        )
        # pip finds the build of torch while it installs the other packages.
        with ThreadPoolExecutor(1) as executor:
            planned = executor.submit(_planned_torch) if is_new and not self._uv else None
            lock = f"deploy/locks/{self._kind}.txt"
            self._install("--require-hashes", "--no-deps", "-r", lock)
            if is_new:
                self._install_torch(planned.result() if planned else None)
        if self._kind == "dev":
            self._install("-c", "constraints.txt", "triton<3.10")  # torch for CUDA brings its own

    def _install_torch(self, planned: list[tuple[str, str]] | None) -> None:
        """`planned` has the packages that pip would install, as `_planned_torch` returns them."""
        if self._uv:
            try:
                _uv_torch(self._uv, backend="auto")
                return
            except _Failed as error:
                self._say(
                    f"uv finds no build of torch for this machine ({error}); pip looks for one"
                )
            planned = _planned_torch()
        cuda = [url for name, url in planned or [] if name.startswith(("nvidia-", "cuda-"))]
        if planned and not cuda:
            _pip("-c", "constraints.txt", *_torch_index(), "torch")
            return
        if cuda and not has_gpu():
            if not self._uv and _install_torch_for_cpu():
                return
            check_disk(ROOT, CUDA_BYTES)
            check_temporary(CUDA_TEMPORARY_BYTES)
            self._say(
                f"downloading {_gigabytes(cuda)} of CUDA libraries, which this machine cannot use, "
                "because no index with torch's CPU build is reached; TORCH_INDEX=URL names one"
            )
        self._install("-c", "constraints.txt", *_torch_index(), "torch")

    def _install(self, *what: str, environment: dict[str, str] | None = None) -> None:
        if self._uv:
            try:
                _run(
                    [self._uv, "pip", "install", "--quiet", "--python", PYTHON, *what], environment
                )
                return
            except _Failed as error:
                self._say(f"uv failed ({error}); pip installs instead")
                self._uv = None
        _pip(*what, environment=environment)

    def _make_environment(self) -> None:
        if _succeeds([PYTHON, "-c", "import pip"]):
            return
        self._say(f"making .venv with Python {platform.python_version()} ({sys.executable})")
        if _succeeds([sys.executable, "-m", "venv", "--clear", VENV]):
            return
        if self._uv and _succeeds(
            [self._uv, "venv", "--quiet", "--seed", "--clear", "--python", sys.executable, VENV]
        ):
            return
        shutil.rmtree(VENV, ignore_errors=True)
        version = "{}.{}".format(*sys.version_info[:2])
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment; install its module venv (Debian "
            f"and Ubuntu: apt install python{version}-venv) or uv"
        )

    def _stage(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {text}", flush=True)

    def _say(self, text: str) -> None:
        print(f"        {text}", flush=True)


def _torch_version() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")).removeprefix("torch==")


def _torch_index() -> list[str]:
    """Returns the options of pip and uv for the index that TORCH_INDEX names."""
    index = os.environ.get("TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def _uv_torch(uv: str, *, backend: str) -> None:
    """Installs torch from torch's own index, or else from the one of TORCH_INDEX. Raises
    _Failed."""
    command = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        PYTHON,
        "-c",
        "constraints.txt",
        "torch",
    ]
    if index := _torch_index():
        # An index of builds of torch also has some other packages, often in old versions.
        command += [*index, "--index-strategy", "unsafe-best-match"]
    else:
        command += ["--torch-backend", backend]
    # An index that cannot be reached is given up at once.
    _run(command, {"UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "30", **os.environ})


def _install_torch_for_cpu() -> bool:
    """Installs torch's CPU build with a temporary uv, which knows the address of torch's index.
    Returns False if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _pip("--target", folder, "uv")
            _uv_torch(f"{folder}/bin/uv", backend="cpu")
        except (InstallError, _Failed):
            return False
    return True


def _planned_torch() -> list[tuple[str, str]]:
    """Returns the name and the URL of each package that pip would install for torch; [] if pip
    fails, because the installation then says why."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--dry-run"]
    command += ["--report", "-", "-c", "constraints.txt"]
    command += [*_torch_index(), "torch"]
    try:
        report = json.loads(_run(command))
    except (_Failed, ValueError):
        return []
    return [(each["metadata"]["name"], each["download_info"]["url"]) for each in report["install"]]


def _gigabytes(urls: list[str]) -> str:
    """Returns the size of these files in words."""
    with ThreadPoolExecutor(8) as executor:
        sizes = list(executor.map(_size, urls))
    known = [size for size in sizes if size is not None]
    return f"{sum(known) / 1e9:.1f} GB" if len(known) == len(urls) else "several GB"


def _size(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        with urlopen(Request(url, method="HEAD"), timeout=_SIZE_TIMEOUT_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def _pip(*what: str, environment: dict[str, str] | None = None) -> None:
    """Runs `pip install`. Raises InstallError."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    try:
        _run([*pip, *what], environment)
    except _Failed as error:
        raise InstallError(f"pip cannot install the packages: {error}") from None


def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> str:
    """Returns the command's output. Raises _Failed with the line of its output that reports the
    error."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("error:")]
    is_traceback = errors[:1] == ["Exception:"]
    last = lines[-1] if lines else f"exit status {done.returncode}"
    raise _Failed(last if is_traceback or not errors else errors[0])


def _succeeds(command: list[str | Path]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
