"""Builds everything that a release consists of, and makes its tag. Publishes nothing.

    .venv/bin/python deploy/release.py              # make release: check and build
    .venv/bin/python deploy/release.py --tag        # and make the tag vX.Y.Z here

The folder dist/vX.Y.Z gets the sdist, the wheel, the chart's archive, the documentation site, the
SBOM, SHA256SUMS and NOTES.md, the section of CHANGELOG.md. The image is built where there is
docker. The last lines name the commands that publish, for a person to run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

from helm_python.chart import package

ROOT = Path(__file__).parents[1]
COMPILED = (
    "tandem/common/_block_hash",
    "tandem/engine/tiers/slots/_sketch_cells",
    "tandem_kernels/native/_decoder",
)
IMAGES = "cpu", "cuda"
_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


class ReleaseError(Exception):
    """A reason why this commit cannot be released."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release. Nothing is published.")
    parser.add_argument("--tag", action="store_true", help="make the tag in this repository")
    parser.add_argument(
        "--without", choices=("image", "sbom"), nargs="*", default=[], help="parts to leave out"
    )
    given = parser.parse_args()
    try:
        version = checked_version()
        folder = build(version, given.without)
        if given.tag:
            _git("tag", "-a", f"v{version}", "-F", str(folder / "NOTES.md"), "--cleanup=verbatim")
    except ReleaseError as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    print(f"\n{folder} has the release {version}. Nothing is published. To publish it:\n")
    print("\n".join(f"  {command}" for command in publishing(version, folder, given.tag)))
    return 0


def checked_version() -> str:
    """Returns the version of this commit. Raises ReleaseError if it cannot be released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "helm/tandem/Chart.yaml").read_text()
    for field in ("version", "appVersion"):
        found = re.search(rf"^{field}: \"?([^\"\n]+)", chart, re.MULTILINE)
        if found is None or found[1] != version:
            raise ReleaseError(
                f"pyproject.toml has the version {version}, and {field} of helm/tandem/Chart.yaml "
                f"is {found[1] if found else 'missing'}"
            )
    notes(version)
    if changed := _git("status", "--porcelain"):
        raise ReleaseError(f"files differ from the commit, first {changed.split()[1]}")
    if _git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists already")
    return str(version)


def notes(version: str) -> str:
    """Returns the section of the version in CHANGELOG.md. Raises ReleaseError without one."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for section in sections[1:]:
        title, _, text = section.partition("\n")
        if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title.strip()):
            return f"Tandem {title.strip()}\n\n{text.strip()}\n"
    raise ReleaseError(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")


def build(version: str, without: list[str]) -> Path:
    """Builds all parts in dist/vVERSION, and returns this folder."""
    folder = ROOT / "dist" / f"v{version}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "NOTES.md").write_text(notes(version))
    parts: dict[str, Callable[[Path], None]] = {
        "sdist": _build_sdist,
        "wheel": _build_wheel,
        "chart": lambda folder: print(package(ROOT / "helm/tandem", destination=folder)),
        "site": _build_site,
        "sbom": _build_sbom,
        "image": _build_images,
    }
    for number, (name, make) in enumerate(parts.items(), 1):
        print(f"{number} of {len(parts)}: {name}", "(left out)" if name in without else "")
        if name not in without:
            make(folder)
    files = sorted(path for path in folder.iterdir() if path.name != "NOTES.md")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def _build_sdist(folder: Path) -> None:
    """Builds the sdist from the files of the commit alone."""
    with tempfile.TemporaryDirectory() as place:
        archive = Path(place) / "tree.tar"
        _git("archive", "--format=tar", f"--output={archive}", "HEAD")
        with tarfile.open(archive) as tree:
            tree.extractall(Path(place) / "tree", filter="data")
        _run([sys.executable, "-c", _BUILD_SDIST, str(folder)], Path(place) / "tree")


def _build_wheel(folder: Path) -> None:
    """Builds the wheel from the sdist, as installers do. Raises ReleaseError if it is not whole."""
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    _run([*pip, *options, str(sdist)], ROOT)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for module in COMPILED:
        if not any(name.startswith(f"{module}.") and name.endswith(".so") for name in names):
            raise ReleaseError(f"the wheel lacks the compiled module {module}")


def _build_site(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        _run([*mkdocs, "--site-dir", place], ROOT)
        with tarfile.open(folder / "tandem-site.tar.gz", "w:gz") as archive:
            archive.add(place, "tandem-site")


def _build_sbom(folder: Path) -> None:
    _run(["make", "--no-print-directory", "sbom"], ROOT)
    shutil.move(ROOT / "sbom.json", folder / "sbom.json")


def _build_images(folder: Path) -> None:
    version = folder.name.removeprefix("v")
    if shutil.which("docker") is None:
        raise ReleaseError("there is no docker for the image; --without image leaves it out")
    for target in IMAGES:
        tag = f"tandem:{version}-{target}"
        dockerfile = ["-f", "deploy/Dockerfile", "--target", target, "-t", tag]
        _run(["docker", "build", *dockerfile, "."], ROOT)


def publishing(version: str, folder: Path, is_tagged: bool) -> list[str]:
    """Returns the commands that publish the release."""
    names = [path.name for path in sorted(folder.iterdir())]
    here = folder.relative_to(ROOT)
    (chart,) = (name for name in names if name.endswith(".tgz"))
    python = [f"{here}/{n}" for n in names if n.startswith("tandem_llm-")]
    make_tag = [] if is_tagged else [f"git tag -a v{version} -F {here}/NOTES.md --cleanup=verbatim"]
    return [
        *make_tag,
        f"git push origin v{version}",
        f"twine upload {' '.join(python)}",
        f"helm push {here}/{chart} oci://REGISTRY/charts",
        *(
            f"docker tag tandem:{version}-{target} REGISTRY/tandem:{version}-{target} && "
            f"docker push REGISTRY/tandem:{version}-{target}"
            for target in IMAGES
        ),
        f"tar -xzf {here}/tandem-site.tar.gz -C WEB_ROOT",
    ]


def _git(*arguments: str) -> str:
    return _run(["git", *arguments], ROOT)


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise ReleaseError(f"{' '.join(command[:4])} failed:\n{output[-2000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
