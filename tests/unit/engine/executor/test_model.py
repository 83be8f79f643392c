"""The decoder against transformers, on random weights of every family."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.model_engines import make_runner
from tests.step_batches import logits_after, mixed_steps
from tests.tiny_models import FAMILIES, make_tiny_model

PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 40, 230)
]


@dataclass(frozen=True)
class Tiny:
    """A family's checkpoint, and transformers' logits [tokens, vocab] of each of PROMPTS."""

    folder: ModelFolder
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder, reference = make_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    with torch.no_grad():
        return Tiny(folder, [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("numerics", "kernels"), [("fast", "auto"), ("fast", "torch"), ("invariant", "torch")]
)
def test_logits_equal_those_of_transformers_however_a_prompt_is_cut(
    tiny: Tiny, numerics: str, kernels: str
) -> None:
    config = EngineConfig(
        model="",
        dtype="float32",
        numerics=numerics,  # type: ignore[arg-type]
        kernels=kernels,  # type: ignore[arg-type]
        block_size=8,
    )
    runner = ModelRunner(tiny.folder, config)
    for index, num_done, logits in mixed_steps(runner, PROMPTS, chunks=(1, 7, 64, 100), seed=1):
        expected = tiny.expected[index][num_done - 1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert logits.argmax() == expected.argmax()


def test_longrope_beyond_the_original_context(tmp_path: Path) -> None:
    """An engine takes the long factors if contexts may be longer, transformers if a call is; so
    workers that differ in it do not share KV."""
    folder, reference = make_tiny_model(
        "phi3-longrope", tmp_path, original_max_position_embeddings=64
    )
    (prompt,) = PROMPTS[-1:]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    for kernels in ("auto", "torch"):
        settings = EngineConfig(model="", dtype="float32", kernels=kernels, device="cpu")  # type: ignore[arg-type]
        runner = ModelRunner(folder, settings)
        torch.testing.assert_close(logits_after(runner, prompt), expected, rtol=1e-4, atol=1e-4)
        assert runner.dtype_name == "float32+long-rope"
    runner = ModelRunner(folder, replace(settings, max_model_len=64))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt[:64]])).logits[0, -1]
    torch.testing.assert_close(logits_after(runner, prompt[:64]), expected, rtol=1e-4, atol=1e-4)
    assert runner.dtype_name == "float32"


def test_kimi_linear_with_the_names_and_keys_of_published_files(tmp_path: Path) -> None:
    """transformers writes other ones: the dense MLP has the name of experts, and layers are
    described by `layer_types`."""
    kinds = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    folder, _ = make_tiny_model("kimi-linear", tmp_path / "own", **kinds)
    config = json.loads((tmp_path / "own/config.json").read_text())
    sizes = {
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    lists = {"full_attn_layers": [3], "kda_layers": [1, 2, 4]}
    for key in ("layer_types", "mlp_layer_types"):
        config.pop(key)
    config |= {"linear_attn_config": sizes | lists, "first_k_dense_replace": 1}
    tensors = {
        name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor
        for name, tensor in load_file(tmp_path / "own/model.safetensors").items()
    }
    shutil.copytree(tmp_path / "own", tmp_path / "published")
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "published/model.safetensors")
    own, published = (
        logits_after(make_runner(each, dtype="float32", kernels="torch"), PROMPTS[1])
        for each in (folder, read_folder(tmp_path / "published"))
    )
    torch.testing.assert_close(own, published, rtol=0, atol=1e-5)


def test_bfloat16_stays_near_float32(tiny: Tiny) -> None:
    """Rounding may change which blocks of tokens an indexer chooses, so that a token sees others
    than in float32. All blocks of the shorter prompt are chosen."""
    indexers = [each.indexer for each in tiny.folder.config.layers if each.indexer is not None]
    which = 1 if any(each.block_size is not None for each in indexers) else -1
    runner = make_runner(tiny.folder, dtype="bfloat16")
    logits = logits_after(runner, PROMPTS[which])
    expected = tiny.expected[which][-1]
    correlation = torch.corrcoef(torch.stack((logits, expected)))[0, 1]
    assert logits.dtype == torch.float32
    assert correlation > 0.99
