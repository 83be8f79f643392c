"""The message for workers that need more memory than is free, and the memory that counts as
free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tandem.common.config.engine import EngineConfig
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.memory import Memory, Need, read_memory, why_too_much, worker_need
from tandem.models.config.quantization_scheme import Quantization, Scheme
from tandem.models.folder import ModelFolder
from tandem.models.source import BUILT_IN, resolve
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.vision_models import make_vision_model

GB = 10**9
NEED = Need("--kv-memory 900000000000", 900 * GB, GB // 2)


@pytest.fixture(scope="module")
def model() -> ModelFolder:
    return resolve(BUILT_IN)


def test_what_does_not_fit_is_told_with_the_sum_and_what_is_free() -> None:
    machine = Memory("this machine", int(21.3 * GB), 24 * GB)
    assert why_too_much(NEED, 2, machine) == (
        "--kv-memory 900000000000: 2 workers need 2 x (900.0 GB pool + 0.5 GB weights) = "
        "1,801.0 GB; this machine has 21.3 GB free. Lower --kv-memory or start fewer workers"
    )
    container = Memory("this container", 3 * GB, 3 * GB)
    assert why_too_much(replace(NEED, weights_bytes=0), 1, container) == (
        "--kv-memory 900000000000: a worker needs 900.0 GB pool = 900.0 GB; this container has "
        "3.0 GB free. Lower --kv-memory"
    )


def test_a_vision_tower_counts_for_each_worker_and_for_encode_workers(tmp_path: Path) -> None:
    folder, whole = make_vision_model(tmp_path)
    text = sum(p.numel() for p in whole.model.text_model.parameters())
    num_tower = sum(p.numel() for p in whole.model.parameters()) - text
    need = worker_need(EngineConfig(model="", kernels="torch", num_blocks=7), folder)
    assert need.tower_bytes == 4 * num_tower
    assert worker_need(EngineConfig(model="", tensor_parallel=2), folder).tower_bytes == 0
    assert worker_need(EngineConfig(model="", kernels="triton"), folder).tower_bytes == 0
    need = replace(NEED, pool_bytes=GB, tower_bytes=GB // 2)
    assert not why_too_much(need, 2, Memory("this machine", int(4.5 * GB), 8 * GB), 1)
    assert why_too_much(need, 2, Memory("this machine", 4 * GB, 8 * GB), 1) == (
        "--kv-memory 900000000000: 2 workers need 2 x (1.0 GB pool + 0.5 GB weights + 0.5 GB "
        "vision tower) + 0.5 GB for 1 encode workers = 4.5 GB; this machine has 4.0 GB free. Lower "
        "--kv-memory or start fewer workers"
    )


def test_a_draft_model_counts_for_the_workers_that_load_it() -> None:
    need = replace(NEED, pool_bytes=GB, draft_bytes=GB)
    four = Memory("this machine", 4 * GB, 8 * GB)
    assert not why_too_much(need, 2, four, num_drafts=1)
    assert "+ 2.0 GB for 2 draft models = 5.0 GB" in why_too_much(need, 2, four, num_drafts=2)
    assert "+ 1.0 GB for the draft model = 2.5 GB" in why_too_much(
        need, 1, Memory("this machine", 2 * GB, 8 * GB)
    )


def test_what_fits_is_not_told() -> None:
    need = Need("--kv-memory 1", 2 * GB, GB)
    assert why_too_much(need, 2, Memory("this machine", 6 * GB, 8 * GB)) == ""
    assert why_too_much(need, 2, Memory("this machine", 6 * GB - 1, 8 * GB))
    assert why_too_much(need, 0, Memory("this machine", 0, 8 * GB)) == ""


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "k8v4", "int4"])
def test_blocks_are_counted_as_the_layout_does(model: ModelFolder, kv_dtype: str) -> None:
    config = EngineConfig(model="", num_blocks=7, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    shape = model.config
    layout = BlockLayout(
        7, shape.num_kv_heads, shape.num_layers, config.block_size, shape.head_dim, kv_dtype
    )
    need = worker_need(config, model)
    assert (need.option, need.pool_bytes) == ("--num-blocks 7", layout.pool_bytes)


@pytest.mark.parametrize("family", ["qwen3-next", "gemma3"])
def test_all_pools_are_counted_as_the_engine_divides_them(family: str, tmp_path: Path) -> None:
    """The slots of states add to the given number of blocks."""
    folder, _ = make_tiny_model(family, tmp_path)
    engine, runner = make_model_engine(folder, dtype="float32", num_blocks=50, max_num_seqs=3)
    config = EngineConfig(model="", num_blocks=50, max_num_seqs=3)
    assert worker_need(config, folder, dtype="float32").pool_bytes == runner.kv.nbytes
    assert engine.layout.pool_bytes == runner.kv.nbytes


def test_weights_count_by_their_dtype_and_whether_they_are_converted(model: ModelFolder) -> None:
    """The built-in model has 134.5 million weights, 96.6 MB in its file; 28.3 million are the
    embedding's."""

    def weights(dtype: str, **settings: str) -> float:
        config = EngineConfig(model="", dtype=dtype, **settings)  # type: ignore[arg-type]
        return worker_need(config, model).weights_bytes / 134.5e6

    embedding = 28.3 / 134.5
    assert weights("auto") == pytest.approx(96.6 / 134.5, rel=0.01)  # as they are in the file
    assert weights("float32") == pytest.approx(4 + 4 * embedding, rel=0.01)
    assert weights("bfloat16") == pytest.approx(2 + 2 * embedding, rel=0.01)
    assert weights("bfloat16", kernels="torch") == pytest.approx(2, rel=0.01)
    assert weights("float32", weights="int8") == pytest.approx(1 + 4 * embedding, rel=0.01)
    assert worker_need(EngineConfig(model=""), None).weights_bytes == 0


def test_weights_of_checkpoints_that_stay_quantized_count_as_their_files(
    model: ModelFolder,
) -> None:
    """Weights of 4 bits may have 4.5 once they are repacked."""

    def weights(is_mxfp4: bool = False, scheme: Scheme | None = None, **settings: str) -> float:
        quantization = None if scheme is None else Quantization(scheme)
        quantized = replace(model.config, is_mxfp4=is_mxfp4, quantization=quantization)
        folder = replace(model, config=quantized, weight_files=(Path(__file__),))
        config = EngineConfig(model="", **settings)  # type: ignore[arg-type]
        return worker_need(config, folder).weights_bytes / Path(__file__).stat().st_size

    assert weights(is_mxfp4=True) == 1
    assert weights(scheme=Scheme("awq", 4)) == pytest.approx(4.5 / 4, rel=0.01)
    assert weights(scheme=Scheme("scaled", 8)) == pytest.approx(8.5 / 8, rel=0.01)
    fp8 = Scheme("scaled", 8, is_float=True)
    assert weights(scheme=fp8) == pytest.approx(1.04, rel=0.01)
    assert weights(scheme=fp8, numerics="invariant", dtype="float32") == weights(scheme=fp8)
    assert weights(scheme=fp8, weights="int8") > 1000
    converted = {"dtype": "bfloat16"}
    for settings in (converted, converted | {"kernels": "torch"}, {"weights": "int8"}):
        assert weights(is_mxfp4=True, **settings) > 1000
    for kernels in ("torch", "triton"):
        for scheme in (None, Scheme("awq", 4), fp8):
            kept = weights(is_mxfp4=scheme is None, scheme=scheme, kernels=kernels)
            assert kept == pytest.approx(1.04, rel=0.005)


def cgroup(folder: Path, limit: str, current: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 1\n")


def test_a_cgroups_limit_is_heeded_and_its_cache_counts_as_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/\n0::/pods/mine\n")
    cgroup(tmp_path / "fs" / "pods" / "mine", "max", 100, 0)
    cgroup(tmp_path / "fs" / "pods", "1000000", 700_000, 99_999)
    found = read_memory(membership, tmp_path / "fs")
    assert found == Memory("this container", 400_000, 1_000_000)
    cgroup(tmp_path / "fs" / "pods" / "mine", "1000", 5000, 0)
    assert read_memory(membership, tmp_path / "fs") == Memory("this container", 0, 1000)


@pytest.mark.parametrize("groups", ["", "1:memory:/mine\n", "0::/\n", "0::/../other\n"])
def test_without_a_limit_the_machine_counts(groups: str, tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    if groups:
        membership.write_text(groups)
    found = read_memory(membership, tmp_path / "fs")
    assert found.place == "this machine"
    assert found.total_bytes == psutil.virtual_memory().total
