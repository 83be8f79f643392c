"""Stubs for other programs: ours, and those that they generate from our protos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = {list(map(str, paths))!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A client's own modules, named by its own choice as protoc's manual shows."""
    folder = tmp_path_factory.mktemp("generated")
    outputs = [f"--{kind}_out={folder / 'theirs'}" for kind in ("python", "grpc_python")]
    (folder / "theirs").mkdir()
    protos = sorted(map(str, (ROOT / "proto/tandem/v1").glob("*.proto")))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    subprocess.run([*command, *outputs, *protos], check=True, timeout=60)
    return folder / "theirs"


def test_ours_are_light() -> None:
    done = run("import tandem.client; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint(("torch", "ray", "redis", "fastapi", "numpy", "tandem.common.config"))
    assert "tandem.net.rpc.tandem.v1.inference_pb2" in loaded


def test_theirs_work_beside_an_installed_tandem(generated: Path) -> None:
    """`tandem/v1` of theirs would lie in our package's name, so it is loaded by its files."""
    code = "from v1 import inference_pb2\nprint(inference_pb2.Chat.DESCRIPTOR.full_name)"
    done = run(code, generated / "tandem")
    assert (done.stdout, done.returncode) == ("tandem.v1.Chat\n", 0), done.stderr


def test_both_in_one_process_are_refused_by_name(generated: Path) -> None:
    done = run("import tandem.client\nfrom v1 import inference_pb2", generated / "tandem")
    assert done.returncode == 1
    assert "TypeError" in done.stderr
    assert "duplicate" in done.stderr
