"""LoRA adapters over bases that stay quantized: Q4_1 of a GGUF file and fp8, on all kernels."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.engine.executor import runner as runner_module
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.executor.weights.share import Share, joined_products
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import converted_folder
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind
from tests.lora_adapters import ALL, ATTENTION, merged, write_adapter
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.test_lora import PROMPTS, add, make_runner, run
from tests.unit.models.checkpoint.quantized.test_tensors import FLOAT
from tests.unit.models.conftest import TOKENS
from tests.unit.models.gguf.test_families import file_of, make_origin

Q4_1 = gguf.GGMLQuantizationType.Q4_1


class Base(NamedTuple):
    """A quantized model, and transformers' own with the numbers that its matrices stand for."""

    folder: ModelFolder
    reference: PreTrainedModel


def rounded(
    model: PreTrainedModel, nearest: Callable[[torch.Tensor], torch.Tensor]
) -> PreTrainedModel:
    """Returns a copy whose matrices, but for the embedding and the output, are rounded."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(nearest(parameter))
    return copied


def in_q4_1(weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), Q4_1), Q4_1))


def q4_1_base(path: Path) -> Base:
    reference = rounded(make_origin("llama-dense", len(TOKENS)), in_q4_1)
    # What was rounded once is quantized to the same numbers.
    file = file_of("llama-dense", reference, path / "tiny.gguf", Q4_1)
    return Base(read_folder(converted_folder(file, cache_dir=path)), reference)


def fp8_base(path: Path) -> Base:
    """Scales of outputs, as compressed-tensors has them."""
    _, origin = make_tiny_model("llama", path)
    file, config_file = path / "model.safetensors", path / "config.json"
    stored = load_file(file)
    wide: dict[str, torch.Tensor] = {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        scale = stored[name].abs().amax(1, keepdim=True) / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
        wide[name] = stored[name].float() * scale
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text()) | {"quantization_config": FLOAT}
    config_file.write_text(json.dumps(config))
    origin.load_state_dict(wide, strict=False)
    return Base(read_folder(path), origin)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    return {
        "Q4_1": q4_1_base(tmp_path_factory.mktemp("q4_1")),
        "fp8": fp8_base(tmp_path_factory.mktemp("fp8")),
    }


def kept_type(runner: ModelRunner) -> str:
    """Returns the name of the type in which the runner has the matrices of its second layer."""
    if runner.native is not None:
        return Kind(runner.native._model.layers[1].qkv.kind).name
    blocks = runner._small._decoder._weights.layers[1].qkv[0].blocks  # type: ignore[union-attr]
    return type(blocks).__name__


# What each kind of kernels keeps of each base. Those with "fast" numerics round what they multiply
# with blocks.
KEPT = {
    ("Q4_1", "torch"): ("invariant", "GgufBlocks"),
    ("Q4_1", "native"): ("fast", "Q4_1"),
    ("fp8", "torch"): ("invariant", "Fp8"),
    ("fp8", "native"): ("invariant", "F8_F32"),
}


@pytest.mark.parametrize(("base", "kernels"), KEPT)
def test_logits_are_those_of_merged_weights(
    base: str, kernels: str, bases: dict[str, Base], tmp_path: Path
) -> None:
    folder, reference = bases[base]
    numerics, kept = KEPT[base, kernels]
    made = write_adapter(tmp_path / "one", folder.config, target_modules=list(ALL), r=12)
    changed = merged(reference, made)
    runner = make_runner(folder, numerics, kernels, dtype="auto")
    assert kept_type(runner) == kept
    digest = add(runner, tmp_path / "one")
    # The base's row stands between the adapter's.
    found = run(runner, [(PROMPTS[i], digest if i != 1 else "") for i in range(4)])
    for i, logits in enumerate(found):
        model, other = (changed, reference) if i != 1 else (reference, changed)
        with torch.no_grad():
            expected = model(torch.tensor([PROMPTS[i]])).logits[0, -1]
            different = other(torch.tensor([PROMPTS[i]])).logits[0, -1]
        if numerics == "fast":
            distance = (logits - expected).norm() / expected.norm()
            assert distance < 0.05 < (logits - different).norm() / different.norm()
        else:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert (logits - different).abs().max() > 1e-2


@pytest.mark.parametrize("base", ["Q4_1", "fp8"])
@pytest.mark.parametrize(
    ("kernels", "numerics"),
    [
        ("torch", "invariant"),
        ("torch", "fast"),
        pytest.param("triton", "fast", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_shares_of_quantized_matrices(
    base: str, kernels: str, numerics: str, bases: dict[str, Base], tmp_path: Path
) -> None:
    """Quantized matrices are divided by outputs in both numerics."""
    folder, _ = bases[base]
    write_adapter(tmp_path / "one", folder.config, target_modules=list(ALL), r=12)
    found = []
    for num_ranks in (1, 2):
        more: dict[str, Any] = {"dtype": "auto", "tensor_parallel": num_ranks, "max_num_seqs": 4}
        runner = make_runner(folder, numerics, kernels, **more)
        kept = {"fp8": "Fp8", "Q4_1": "GgufBlocks" if kernels == "torch" else "PackedGroups"}
        assert kept_type(runner) == kept[base]
        digest = add(runner, tmp_path / "one")
        found.append(run(runner, [(PROMPTS[i], digest if i % 2 else "") for i in range(4)]))
        runner.close()
    if numerics == "invariant":
        assert all(map(torch.equal, *found))
    else:  # of tokens that are computed in bfloat16
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() / one.norm() < 0.05


def test_a_ranks_shares_of_q_k_and_v_become_one_matrix_on_a_gpu(bases: dict[str, Base]) -> None:
    folder, _ = bases["Q4_1"]
    layer = load_weights(
        folder.weight_files,
        folder.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kept_for="triton",
        share=Share(1, 2),
    ).layers[0]
    (qkv,) = joined_products(layer).qkv
    assert qkv.blocks is not None
    apart = [part.blocks.numbers() for part in layer.qkv if part.blocks is not None]
    assert len(apart) == 3
    assert torch.equal(qkv.blocks.numbers(), torch.cat(apart))
    assert qkv.weight.shape == qkv.blocks.shape


def nine(runner: ModelRunner, path: Path, lengths: tuple[int, ...]) -> list[tuple[list[int], str]]:
    """Adds 8 adapters; returns a sequence of each and of the base, in mixed order."""
    digests = [""]
    for i in range(8):
        targets = ALL if i % 2 else ATTENTION
        folder = path / f"adapter-{i}"
        rank = (4, 8, 16)[i % 3]
        write_adapter(folder, runner._model_config, seed=i, r=rank, target_modules=targets)
        digests.append(add(runner, folder))
    order = (4, 0, 8, 3, 1, 7, 2, 6, 5)
    return [(PROMPTS[2][: lengths[i % len(lengths)]], digests[i]) for i in order]


@pytest.mark.parametrize(("base", "kernels"), KEPT)
def test_eight_adapters_and_the_base_equal_nine_runs_bit_by_bit(
    base: str, kernels: str, bases: dict[str, Base], tmp_path: Path
) -> None:
    numerics, kept = KEPT[base, kernels]
    runner = make_runner(bases[base].folder, numerics, kernels, dtype="auto")
    assert kept_type(runner) == kept
    mixed = nine(runner, tmp_path, (12, 13, 14, 15, 16))
    together = run(runner, mixed)
    alone = [run(runner, [one])[0] for one in mixed]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    assert len({tuple(logits.tolist()) for logits in alone}) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights and pools are on the CPU")
@pytest.mark.parametrize(
    ("base", "kept"),
    [("Q4_1", "PackedGroups"), pytest.param("fp8", "Fp8", marks=pytest.mark.slow)],
)
def test_triton_computes_eight_adapters_and_the_base_as_torch_does_nine_runs(
    base: str, kept: str, bases: dict[str, Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "has_bfloat16", lambda _: False)
    folder = bases[base].folder
    by_torch, by_triton = (
        make_runner(folder, "fast", kernels, dtype="auto") for kernels in ("torch", "triton")
    )
    assert kept_type(by_triton) == kept
    mixed = nine(by_torch, tmp_path, (2, 3))
    assert nine(by_triton, tmp_path, (2, 3)) == mixed
    alone = torch.stack([run(by_torch, [one])[0] for one in mixed])
    torch.testing.assert_close(torch.stack(run(by_triton, mixed)), alone, rtol=1e-4, atol=1e-4)
    assert len({tuple(logits.tolist()) for logits in alone}) == 9
