"""The install: what it checks before it changes anything, and which build of torch it takes.

The installs are of a small project, with this repository's install.py, the real pip and the real
uv, from an index of small packages on this disk.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import wheel as harness

TORCH = "9.9"
GPU_BUILD = {"nvidia-cublas": "1"}  # requirements of the build of torch that has CUDA

# A compiler that makes nothing.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done
touch "$2"
"""

MAKE_ENVIRONMENT = """
import sys
sys.path[0] = "deploy"
import install
install._Install("runtime")._make_environment()
"""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    file = harness.ROOT / "deploy" / "install.py"
    spec = importlib.util.spec_from_file_location("install", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_python_is_refused(install: ModuleType) -> None:
    for version in ((3, 11), (3, 14)):
        install.check_python(version)
    for version in ((3, 10), (3, 15)):
        with pytest.raises(install.InstallError, match=r"needs Python 3\.11 to 3\.14, .*PYTHON="):
            install.check_python(version)


@pytest.mark.parametrize(
    ("system", "machine", "glibc", "message"),
    [
        ("darwin", "arm64", (), r"Linux only, and this is darwin; .*docs/install\.md"),
        ("linux", "riscv64", (2, 36), "x86-64 and arm64, and this is riscv64"),
        ("linux", "x86_64", (2, 28), r"glibc 2\.31 or newer, and this system has glibc 2\.28"),
        ("linux", "x86_64", (), "this system has another C library"),
    ],
)
def test_a_system_without_packages_is_refused(
    install: ModuleType, system: str, machine: str, glibc: tuple[int, ...], message: str
) -> None:
    install.check_system("linux", "aarch64", (2, 31))
    with pytest.raises(install.InstallError, match=message):
        install.check_system(system, machine, glibc)


def test_this_system_is_accepted(install: ModuleType) -> None:
    install.check_system(sys.platform, os.uname().machine, install.glibc_version())


def test_too_little_space_is_reported_with_its_disk_and_what_to_do(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.check_disk(tmp_path, 1)
    install.check_cache(tmp_path / "cache")
    much = 1 << 60
    with pytest.raises(install.InstallError, match=rf"the disk of {tmp_path} has .* free some"):
        install.check_disk(tmp_path, much)
    with pytest.raises(install.InstallError, match=r"temporary files take .* variable TMPDIR"):
        install.check_temporary(much)
    monkeypatch.setattr(install, "CACHE_BYTES", much)
    named = rf"the disk of the cache folder {tmp_path} has .* variable TANDEM_CACHE_DIR"
    with pytest.raises(install.InstallError, match=named):
        install.check_cache(tmp_path)


class Project:
    """A project with the files that install.py reads, and with a .venv that has pip."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / ".venv" / "bin" / "python"
        for name in ("deploy/install.py", "kernels/native_build.py"):
            (root / name).parent.mkdir(parents=True)
            shutil.copy(harness.ROOT / name, root / name)
        (root / "kernels/tandem_kernels/native").mkdir(parents=True)
        for source in (harness.ROOT / "kernels/tandem_kernels/native").glob("*.cpp"):
            (root / "kernels/tandem_kernels/native" / source.name).touch()
        compiler = root / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        self.index = root / "index"
        locked = write_wheel(self.index, "locked", "1", {})
        digest = hashlib.sha256(locked.read_bytes()).hexdigest()
        (root / "deploy" / "locks").mkdir()
        (root / "deploy/locks/runtime.txt").write_text(f"locked==1 --hash=sha256:{digest}\n")
        (root / "constraints.txt").write_text(f"torch=={TORCH}\n")
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            '[project]\nname = "toy"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
        )
        write_wheel(self.index, "nvidia-cublas", "1", {})
        write_wheel(self.index, "torch", TORCH, GPU_BUILD)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
        (packages,) = root.glob(".venv/lib/python*/site-packages")
        for package in ("pip", "setuptools", "_distutils_hack"):
            for item in harness.ROOT.glob(f".venv/lib/python*/site-packages/{package}*"):
                (packages / item.name).symlink_to(item)

    def install(self, *, path: str = "/usr/bin:/bin", **variables: str) -> tuple[int, str]:
        """Runs `install.py runtime`. Returns the exit status and the output."""
        environment = {
            "PATH": path,
            "HOME": str(self.root / "home"),
            "CXX": str(self.root / "compiler"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "UV_DEFAULT_INDEX": self.index.as_uri(),
            "TANDEM_NATIVE": "plain",  # this compiler cannot find out which one is best
            "UV_OFFLINE": "1",  # torch's own index cannot be reached
            **variables,
        }
        done = subprocess.run(
            [self.python, "deploy/install.py", "runtime"],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def installed(self) -> set[str]:
        """Returns the installed packages as NAME-VERSION, without pip and setuptools."""
        found = self.root.glob(".venv/lib/python*/site-packages/*.dist-info")
        names = {each.name.removesuffix(".dist-info") for each in found}
        return {name for name in names if not name.startswith(("pip-", "setuptools-"))}


def write_wheel(index: Path, name: str, version: str, requires: dict[str, str]) -> Path:
    """Writes an empty package into an index of packages (PEP 503) on this disk."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {other}=={number}\n" for other, number in requires.items()
    )
    info = f"{stem}.dist-info"
    file = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    links = "".join(f'<a href="{each.name}">{each.name}</a>\n' for each in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n")
    return file


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_without_an_index_of_cpu_builds_the_size_of_cuda_is_said(
    project: Project, install: ModuleType
) -> None:
    if install.has_gpu():
        pytest.skip("this machine has a GPU")
    status, said = project.install()
    assert status == 0, said
    assert "downloading 0.0 GB of CUDA libraries, which this machine cannot use" in said
    assert "TORCH_INDEX=URL names one" in said
    assert f"torch-{TORCH}" in project.installed()
    assert [
        line.split("  ")[-1].split(":")[0] for line in said.splitlines() if " of 3" in line
    ] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]
    # What is installed already is not looked for again.
    status, said = project.install(PIP_INDEX_URL=(project.root / "nothing").as_uri())
    assert status == 0, said
    assert "CUDA" not in said


def test_the_index_of_cpu_builds_is_used(project: Project) -> None:
    write_wheel(project.root / "builds", "torch", f"{TORCH}+cpu", {})
    status, said = project.install(TORCH_INDEX=(project.root / "builds").as_uri())
    assert status == 0, said
    assert project.installed() == {"locked-1", f"torch-{TORCH}+cpu", "toy-1"}
    assert "CUDA" not in said


def test_uv_is_used_if_it_is_installed(project: Project) -> None:
    uv = harness.ROOT / ".venv" / "bin"
    # pip's index has the CPU build, too: a user's own mirror.
    write_wheel(project.root / "builds", "torch", f"{TORCH}+cpu", {})
    status, said = project.install(
        path=f"{uv}:/usr/bin:/bin", PIP_EXTRA_INDEX_URL=(project.root / "builds").as_uri()
    )
    assert status == 0, said
    assert "packages with uv" in said
    assert "uv finds no build of torch for this machine" in said
    assert project.installed() == {"locked-1", f"torch-{TORCH}+cpu", "toy-1"}
    (installer,) = project.root.glob(".venv/lib/python*/site-packages/locked-1.dist-info/INSTALLER")
    assert installer.read_text().strip() == "uv"


def test_pip_installs_what_uv_cannot(project: Project) -> None:
    uv = harness.ROOT / ".venv" / "bin"
    status, said = project.install(
        path=f"{uv}:/usr/bin:/bin", UV_DEFAULT_INDEX=(project.root / "nothing").as_uri()
    )
    assert status == 0, said
    assert "pip installs instead" in said
    assert {"locked-1", "toy-1"} < project.installed()


def test_a_package_that_differs_from_the_lock_ends_the_install_in_one_line(
    project: Project,
) -> None:
    lock = project.root / "deploy/locks/runtime.txt"
    lock.write_text(f"locked==1 --hash=sha256:{'0' * 64}\n")
    status, said = project.install()
    assert status == 1
    last = said.splitlines()[-1]
    assert last.startswith("Tandem cannot be installed: pip cannot install the packages: ")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in last
    assert project.installed() == set()


def test_nothing_is_installed_without_a_compiler_that_works(project: Project) -> None:
    status, said = project.install(path="/nowhere", CXX="")
    assert (status, len(said.splitlines())) == (1, 1)
    assert "no C++ compiler is found" in said
    assert "apt install g++" in said
    (project.root / "compiler").write_text(
        '#!/bin/sh\necho "check.cpp:1:10: fatal error: omp.h: No such file" >&2; exit 1\n'
    )
    status, said = project.install()
    assert (status, len(said.splitlines())) == (1, 1)
    assert "fatal error: omp.h: No such file" in said
    assert "apt install g++" in said
    assert project.installed() == set()


def test_nothing_is_installed_if_the_cache_folder_cannot_be_written(project: Project) -> None:
    status, said = project.install(HOME="/proc/nowhere")
    assert (status, len(said.splitlines())) == (1, 1)
    assert "the cache folder /proc/nowhere/.cache/tandem cannot be written" in said
    assert "TANDEM_CACHE_DIR" in said
    assert project.installed() == set()
    status, said = project.install(
        HOME="/proc/nowhere", TANDEM_CACHE_DIR=str(project.root / "cache")
    )
    assert status == 0, said


def test_a_folder_that_looks_like_an_environment_is_made_anew(project: Project) -> None:
    """A copy from another machine, whose Python is not here."""
    project.python.unlink()
    project.python.symlink_to("/nowhere/python3")
    done = subprocess.run(
        [sys.executable, "-c", MAKE_ENVIRONMENT],
        cwd=project.root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "making .venv with Python" in done.stdout
    assert subprocess.run([project.python, "-c", "import pip"], check=False).returncode == 0
