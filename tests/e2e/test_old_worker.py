"""A rolling upgrade: a worker of the version before the packages were renamed, among new processes.

That version's import packages are `services` and `kernels`; it writes the same records, keys and
messages. It runs without its compiled modules, so both workers compute with torch. The model is a
Hugging Face folder: that version converted the weights of a GGUF file, and its fingerprint of one
is of the converted weights.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.models.gguf.export import export
from tandem.models.source import resolve
from tests.harness.client import complete_all, golden, metric
from tests.harness.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
OLD_VERSION = "07fd5d9"
PROMPTS = (0, 1, 2, 4, 5)


@pytest.fixture(scope="module")
def old_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the old version's packages."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", OLD_VERSION], capture_output=True).returncode:
        pytest.skip(f"this checkout has no commit {OLD_VERSION}: its history was cut off")
    command = [*git, "archive", OLD_VERSION, "services", "kernels"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(resolve("smollm2"), tmp_path_factory.mktemp("model") / "SmolLM2-135M-Instruct")


@pytest.mark.parametrize(("old", "transport"), [("decode", "grpc"), ("prefill", "nixl")])
async def test_an_old_worker_and_a_new_one_exchange_blocks(
    old: str,
    transport: str,
    old_packages: Path,
    model: Path,
    redis_server: EmbeddedRedis,
    tmp_path: Path,
) -> None:
    cluster = LocalCluster(redis_server, tmp_path, str(model))
    options = ("--prefill-at", "remote", "--local-prefill-max-tokens", "0", "--kernels", "torch")
    try:
        cluster.start_router()
        for role in ("prefill", "decode"):
            module = "services.worker" if role == old else "tandem.worker"
            environment = {"PYTHONPATH": str(old_packages)} if role == old else {}
            cluster.start_worker(
                f"{role}-0", role, *options, environment=environment, module=[module]
            )
        cluster.wait_ready()
        prompts, expected = golden(*PROMPTS)
        answers = await complete_all(cluster, prompts, max_tokens=32)
        assert [a.token_ids for a in answers] == [tokens[:32] for tokens in expected]
        needed = (
            sum(-(-len(p) // 16) for p in prompts) - sum(a.cached_tokens for a in answers) // 16
        )
        pulled = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport)
        assert pulled >= needed > 0
        cluster.wait_idle()
    finally:
        cluster.close()
