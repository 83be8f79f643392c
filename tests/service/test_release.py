"""A release of a copy of this repository, up to the point where it would be published."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.harness.documents import ROOT

pytestmark = pytest.mark.timeout(400)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
AUTHOR = ["-c", "user.name=Tester", "-c", "user.email=tester@example.com"]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *AUTHOR, "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/release.py", "--without", "image", "sbom", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=360)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository of the files here, whose changelog has a section of the version."""
    folder = tmp_path / "copy"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
    changelog = folder / "CHANGELOG.md"
    section = f"## {VERSION} (2026-12-01)"
    changelog.write_text(changelog.read_text().replace("## Unreleased", section, 1))
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "Tester")
    git(folder, "config", "user.email", "tester@example.com")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "All files")
    return folder


def test_a_release_has_all_its_parts_and_a_tag(copy: Path) -> None:
    done = release(copy, "--tag")
    assert done.returncode == 0, done.stderr
    folder = copy / "dist" / f"v{VERSION}"
    names = {path.name for path in folder.iterdir()}
    (wheel,) = folder.glob("*.whl")
    sdist, chart = f"tandem_llm-{VERSION}.tar.gz", f"tandem-{VERSION}.tgz"
    site = "tandem-site.tar.gz"
    assert names == {wheel.name, sdist, chart, site, "SHA256SUMS", "NOTES.md"}
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == names - {"SHA256SUMS", "NOTES.md"}
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    with zipfile.ZipFile(wheel) as archive:
        assert any("tandem_kernels/native/_decoder" in name for name in archive.namelist())
    with tarfile.open(folder / site) as archive:
        assert "tandem-site/index.html" in archive.getnames()
    # The tag has the text of the changelog, with its headings.
    text = git(copy, "tag", "--list", f"v{VERSION}", "--format=%(contents)")
    assert text.startswith(f"Tandem {VERSION} (2026-12-01)")
    assert "### Added" in text
    assert git(copy, "remote") == ""
    assert f"git push origin v{VERSION}" in done.stdout
    # The same version is not released twice.
    again = release(copy)
    assert again.returncode == 1
    assert f"the tag v{VERSION} exists already" in again.stderr


@pytest.mark.parametrize(
    ("path", "old", "new", "reason"),
    [
        ("helm/tandem/Chart.yaml", f"appVersion: {VERSION}", "appVersion: 9.9.9", "appVersion"),
        ("CHANGELOG.md", f"## {VERSION} (", "## 9.9.9 (", f"has no section '## {VERSION}"),
        ("README.md", "# Tandem", "# Tandem!", "files differ from the commit, first README.md"),
    ],
)
def test_a_commit_that_is_not_ready_is_refused(
    copy: Path, path: str, old: str, new: str, reason: str
) -> None:
    text = (copy / path).read_text()
    assert old in text
    (copy / path).write_text(text.replace(old, new, 1))
    done = release(copy)
    assert done.returncode == 1
    assert reason in done.stderr
    assert not (copy / "dist").exists()
