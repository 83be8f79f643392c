"""The Triton path against the torch reference: the same tokens, whole and in mixed steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.triton import tuning_shapes
from tandem.engine.executor.triton.decode_graphs import bucket_sizes
from tandem.engine.executor.triton.indexers import places_of
from tandem.engine.executor.triton.inputs import (
    DecodeRows,
    StepShape,
    StepViews,
    fill,
    write_step,
)
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem_kernels.kv_cache import KvPool
from tests.lora_adapters import ALL, describe, write_adapter
from tests.step_batches import mixed_steps, place
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

FAMILIES = (
    "llama",
    pytest.param("llama-linear-biases", marks=pytest.mark.slow),
    pytest.param("llama-small-heads", marks=pytest.mark.slow),
    pytest.param("qwen3", marks=pytest.mark.slow),
    pytest.param("smollm3", marks=pytest.mark.slow),
    pytest.param("olmo2", marks=pytest.mark.slow),
    pytest.param("granite", marks=pytest.mark.slow),
    pytest.param("phi3", marks=pytest.mark.slow),
    "gpt-oss",
    pytest.param("deepseek-v2", marks=pytest.mark.slow),
    pytest.param("deepseek-v2-groups", marks=pytest.mark.slow),
    pytest.param("deepseek-v3", marks=pytest.mark.slow),
    pytest.param("deepseek-v3-halves", marks=pytest.mark.slow),
    pytest.param("mixtral", marks=pytest.mark.slow),
    pytest.param("qwen3-moe", marks=pytest.mark.slow),
    pytest.param("gemma2", marks=pytest.mark.slow),
    "gemma3",
)
WINDOWS = {
    "phi3": 8,
    "mixtral": 8,
    "gpt-oss": 8,
    "gemma2": 8,
    "gemma3": 8,
}  # tokens; shorter than the longest prompt
PROMPTS = [list(range(1, 20)), [5, 9, 2], [7]]
MLP = ("gate_proj", "up_proj", "down_proj")


def runner_of(
    folder: ModelFolder, kernels: str, kv_dtype: str = "float32", lora: Sequence[str] = ()
) -> ModelRunner:
    config = EngineConfig(
        model=str(folder.path), dtype="float32", block_size=8, max_num_seqs=5, max_model_len=96
    )
    config = replace(config, lora=tuple(lora))
    return ModelRunner(folder, replace(config, kernels=kernels, kv_dtype=kv_dtype))  # type: ignore[arg-type]


def greedy(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_output_tokens: int
) -> list[list[int]]:
    """Chunked prefill of all prompts at once, then decode of all, in a batch of changing size."""
    sequences = place(runner, [[*prompt, *[0] * num_output_tokens] for prompt in prompts])
    lens = [len(prompt) for prompt in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    tokens = [list(prompt) for prompt in prompts]
    while any(len(m) < num_output_tokens for m in made):
        going = [i for i in range(len(prompts)) if len(made[i]) < num_output_tokens - i]
        going = going or [i for i in range(len(prompts)) if len(made[i]) < num_output_tokens]
        slices = []
        for i in going:
            sequences[i].token_ids = tokens[i]
            slices.append(sequences[i].take(16))
        logits = runner.forward(StepBatch(slices))
        for i, row in zip(going, logits, strict=True):
            if sequences[i].done == len(tokens[i]):
                made[i].append(int(row.argmax()))
                tokens[i].append(made[i][-1])
    assert lens == [len(prompt) for prompt in prompts]
    return made


def test_adapters_that_come_later_are_refused_with_states(tmp_path: Path) -> None:
    """A worker without adapters at the start may have chosen Triton."""
    folder, _ = make_tiny_model("qwen3-next", tmp_path / "model")
    write_adapter(tmp_path / "a", folder.config, r=4, target_modules=["q_proj"])
    runner = runner_of(folder, "triton")
    with pytest.raises(ConfigError, match="do not support adapters of models with states"):
        runner.load_adapter(describe("a", tmp_path / "a", folder.config))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_torch(family: str, tmp_path: Path) -> None:
    more = {"sliding_window": WINDOWS[family]} if family in WINDOWS else {}
    folder, _ = make_tiny_model(family, tmp_path, **more)
    expected = greedy(runner_of(folder, "torch"), PROMPTS, 4)
    assert greedy(runner_of(folder, "triton"), PROMPTS, 4) == expected


# Of the kernels alone, tests/unit/kernels/triton has both types in CI.
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_same_tokens_as_torch_over_quantized_kv(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    more = {"sliding_window": WINDOWS[family]} if family in WINDOWS else {}
    folder, _ = make_tiny_model(family, tmp_path, **more)
    by_torch, by_triton = (runner_of(folder, kernels, kv_dtype) for kernels in ("torch", "triton"))
    assert greedy(by_triton, PROMPTS, 4) == greedy(by_torch, PROMPTS, 4)
    for ours, theirs in zip(by_triton.pools, by_torch.pools, strict=True):
        assert (ours.memory == theirs.memory).float().mean() > 0.99


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ALL),
        (
            "deepseek-v3",
            ("q_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP),
        ),
        pytest.param(
            "deepseek-v2",
            ("kv_b_proj", "q_proj", "kv_a_proj_with_mqa", "o_proj"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_adapters_beside_the_base_as_torch_computes_them(
    family: str, targets: Sequence[str], tmp_path: Path
) -> None:
    # Of DeepSeek V3's layers only the first is dense.
    folder, _ = make_tiny_model(family, tmp_path / "model", num_hidden_layers=2)
    paths = [tmp_path / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        modules = (targets, targets[:1])[seed]
        write_adapter(path, folder.config, seed=seed, r=4 + seed, target_modules=list(modules))
    adapters = [describe(path.name, path, folder.config) for path in paths]
    digests = ["", *(adapter.digest for adapter in adapters)]
    found = []
    # Graphs of steps with adapters are recorded if adapters are given at the start.
    named = [f"{path.name}={path}" for path in paths]
    for kernels, lora in (("torch", []), ("triton", []), ("triton", named)):
        runner = runner_of(folder, kernels, lora=lora)
        for adapter in adapters:
            runner.add_adapter(runner.load_adapter(adapter))
        logits = []
        sequences = place(runner, [[*prompt, 3] for prompt in PROMPTS])
        for num_tokens in (2, 30, 1):
            going = [i for i, s in enumerate(sequences) if s.done < len(s.token_ids)]
            slices = [sequences[i].take(num_tokens)._replace(adapter=digests[i]) for i in going]
            if slices:
                logits.append(runner.forward(StepBatch(slices)).clone())
        found.append(torch.cat(logits))
    for logits_of_triton in found[1:]:
        torch.testing.assert_close(logits_of_triton, found[0], rtol=1e-4, atol=1e-4)


def test_an_adapter_keeps_its_number_until_it_is_dropped(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1)
    runner = runner_of(folder, "triton")
    adapters = []
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(tmp_path / name, folder.config, seed=seed, r=4)
        adapters.append(describe(name, tmp_path / name, folder.config))
    weights = [runner.load_adapter(adapter) for adapter in adapters]
    assert runner._triton is not None
    numbers = runner._triton._adapters.numbers
    runner.add_adapter(weights[0])
    runner.add_adapter(weights[1])
    before = dict(numbers)
    runner.drop_adapter(adapters[0].digest)
    runner.add_adapter(weights[2])
    assert numbers == {
        adapters[1].digest: before[adapters[1].digest],
        adapters[2].digest: before[adapters[0].digest],
    }
    assert 0 not in numbers.values()


def test_the_same_logits_in_steps_of_any_mixture(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("qwen3", tmp_path, num_hidden_layers=2)
    prompts = [random.Random(i).choices(range(203), k=n) for i, n in enumerate((1, 13, 9))]
    by_torch = mixed_steps(runner_of(folder, "torch"), prompts, (1, 3, 8), seed=4)
    by_triton = mixed_steps(runner_of(folder, "triton"), prompts, (1, 3, 8), seed=4)
    for expected, actual in zip(by_torch, by_triton, strict=True):
        assert actual[:2] == expected[:2]
        torch.testing.assert_close(actual[2].cpu(), expected[2].cpu(), rtol=1e-4, atol=1e-4)


def test_kv_is_told_of_once_when_somebody_waits(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    runner = runner_of(folder, "triton")
    (sequence,) = place(runner, [[1, 2, 3, 4]])
    told: list[int] = []
    runner.forward(StepBatch([sequence.take(3)]), lambda: told.append(3))
    runner.forward(StepBatch([sequence.take(1)]), lambda: told.append(4))
    assert told == [3, 4]


def test_padding_changes_no_state() -> None:
    chunk = SequenceSlice([1, 2, 3], 5, [4], True, other_tables=([9],))
    single = SequenceSlice([7], 12, [3, 5], True, other_tables=([6],))
    batch = StepBatch([chunk, single])
    step = write_step(batch, 8, num_states=1)
    assert [part.tolist() for part in step.single_spans(1).tensors] == [[0], [1], [11], [6]]
    chunks = step.chunk_spans(1)
    assert [part.tolist() for part in chunks.tensors] == [[0], [3], [2], [9]]
    assert chunks.max_rows == 3

    shape = StepShape(10, 4, 2, 4, 2, 1, num_states=1)
    padded = StepViews.of(torch.full((sum(shape.sizes),), 77, dtype=torch.int32), shape)
    fill(padded, batch, 8)
    single_spans, chunks = padded.single_spans(1), padded.chunk_spans(1)
    assert [part.tolist()[0] for part in single_spans.tensors] == [0, 1, 11, 6]
    assert [part.tolist()[0] for part in chunks.tensors] == [0, 3, 2, 9]
    assert single_spans.num_rows[1] == chunks.num_rows[1] == 0
    assert chunks.max_rows == 8

    shape = StepShape(3, 3, 3, 3, 2, 1, num_states=1)
    array = torch.full((sum(shape.sizes),), 77, dtype=torch.int32)
    DecodeRows(array, shape).write([single], 8)
    spans = StepViews.of(array, shape).single_spans(1)
    assert [part.tolist() for part in spans.tensors] == [
        [0, 0, 0],
        [1, 0, 0],
        [11, 0, 0],
        [6, 0, 0],
    ]


def test_places_of_the_rows_of_a_step() -> None:
    chunks = [SequenceSlice([1] * n, n + 4, [7, 8], True) for n in (2, 3)]
    batch = StepBatch([chunks[0], SequenceSlice([7], 12, [3, 5], True), chunks[1]])
    places = places_of(write_step(batch, 8))
    assert places.seqs.tolist() == [0, 1, 1, 2, 2, 2]
    assert places.lens.tolist() == [12, 5, 6, 5, 6, 7]
    assert places.block_tables.tolist() == [[3, 5], [7, 8], [7, 8]]

    # Two single tokens, and chunks of 8 tokens: 3 of padding, which are a chunk of their own.
    shape = StepShape(10, 6, 2, 6, 2)
    padded = StepViews.of(torch.full((sum(shape.sizes),), 77, dtype=torch.int32), shape)
    fill(padded, batch, 8)
    places = places_of(padded)
    assert places.seqs.tolist() == [0, 1, 2, 2, 3, 3, 3, 4, 4, 4]
    assert places.lens.tolist() == [12, 0, 5, 6, 5, 6, 7, 1, 2, 3]


def test_the_step_as_one_array() -> None:
    chunk = SequenceSlice([4, 5, 6], 10, [7, 2], False)
    single = SequenceSlice([9], 5, [3], True)
    step = write_step(StepBatch([chunk, single]), block_size=8)
    assert step.token_ids.tolist() == [9, 4, 5, 6]
    assert step.positions.tolist() == [4, 7, 8, 9]
    assert step.slots.tolist() == [[3 * 8 + 4, 7 * 8 + 7, 2 * 8, 2 * 8 + 1]]
    assert step.context_lens.tolist() == [5, 10]
    assert step.query_starts.tolist() == [0, 3]
    assert step.logit_rows.tolist() == [0]
    assert step.block_tables.tolist() == [[[3, 0], [7, 2]]]


def test_rows_of_a_decode_step_follow_their_tables() -> None:
    shape = StepShape(3, 3, 3, 3, 4)
    array = torch.full((sum(shape.sizes),), 77, dtype=torch.int32)
    rows = DecodeRows(array, shape)
    tables = [[5, 6], [8]]
    views = StepViews.of(array, shape)

    def write() -> list[tuple[int, int, int, int]]:
        slices = [SequenceSlice([10 + i], 8 * len(t), t, True) for i, t in enumerate(tables)]
        changed = rows.write(slices, 8)
        used = views.logit_rows[: len(tables)].tolist()
        for i, (row, table) in enumerate(zip(used, tables, strict=True)):
            assert views.block_tables[0, row, : len(table)].tolist() == table
            assert views.token_ids[row] == 10 + i
            assert views.slots[0, row] == table[-1] * 8 + 7
            assert views.context_lens[row] == 8 * len(table)
        for row in {0, 1, 2} - set(used):
            assert (views.slots[0, row], views.context_lens[row]) == (-1, 0)
        return changed

    assert write() == [(0, 0, 0, 2), (0, 1, 0, 1)]
    assert write() == []
    tables[0][0] = 4  # a twin took its place
    tables[0].append(9)
    tables[1] = [2, 3]  # of another sequence
    assert write() == [(0, 0, 0, 3), (0, 1, 0, 2)]
    tables[0].append(1)
    assert write() == [(0, 0, 3, 4)]
    kept = tables.pop()  # and the first sequence ends
    row = int(views.logit_rows[1])
    tables[:] = [kept]
    assert write() == []
    assert views.logit_rows[0] == row


def test_buckets_end_with_the_maximum() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(5) == [1, 2, 4, 5]
    assert bucket_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert bucket_sizes(400)[-3:] == [320, 384, 400]


def test_triton_is_refused_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    config = EngineConfig(model=str(folder.path), device="cpu", kernels="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        ModelRunner(folder, config)
    with pytest.raises(ConfigError, match="invariant"):
        ModelRunner(folder, replace(config, numerics="invariant"))


def test_a_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from tandem.engine.executor.triton.steps import check_cache_folder

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "new" / "triton"))
    check_cache_folder()
    assert not list((tmp_path / "new" / "triton").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR"):
        check_cache_folder()


def test_kernels_are_tuned_over_the_servers_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuned chunk has the tokens of the largest step and a prefix; a pool with too few blocks
    is repeated and is left zero."""
    monkeypatch.setattr(tuning_shapes, "CONTEXT_LEN", 64)
    folder, _ = make_tiny_model("llama", tmp_path, num_hidden_layers=1)
    config = EngineConfig(
        model=str(folder.path), dtype="float32", block_size=8, max_num_seqs=2, max_model_len=96
    )
    config = replace(config, kernels="triton", max_tokens_per_step=24)
    runner = ModelRunner(folder, config)
    steps = runner._triton
    assert steps is not None
    batches: list[StepBatch] = []
    run_mixed = steps._run_mixed

    def run(batch: StepBatch, *args: Any, **named: Any) -> Any:
        batches.append(batch)
        return run_mixed(batch, *args, **named)

    monkeypatch.setattr(steps, "_run_mixed", run)
    prepare = steps.prepare

    def prepare_as_on_a_gpu(pools: Sequence[KvPool]) -> None:
        prepare(pools)
        steps._tune_chunks(pools, 5)

    monkeypatch.setattr(steps, "prepare", prepare_as_on_a_gpu)
    runner.allocate(5)
    slices = [batch.slices[0] for batch in batches]
    assert [(piece.num_tokens, piece.context_len) for piece in slices] == [(24, 64), (16, 64)]
    assert slices[0].block_table == [0, 1, 2, 3, 4, 0, 1, 2]
    assert not runner.kv.any()
