"""Latent attention by C++ on every instruction set, beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.cache.layout.kv_groups import model_layout
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.executor.weights.lora import load_lora
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.folder import ModelFolder
from tests.kv_pools import empty_pool
from tests.lora_adapters import describe, write_adapter
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native.test_decoder import INSTRUCTIONS

PROMPT = torch.randint(0, 203, (150,), generator=torch.Generator().manual_seed(2)).tolist()
CUTS = ([150], [1] * 9 + [141], [40, 1, 100, 9])
TABLE = [17, 3, 0, 12, 9, 1, 8, 16, 2, 11, 4, 10, 7]
BLOCK_SIZE = 12


# Tokens have all experts: none is chosen by the last bits of a score.
ALL_EXPERTS = {"num_experts_per_tok": 6, "n_routed_experts": 6, "n_group": 3, "topk_group": 3}
RANK, ROPE = 48, 16  # int8 has multiples of 16


@pytest.fixture(params=["deepseek-v2", "deepseek-v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFolder:
    return make_tiny_model(request.param, tmp_path, **ALL_EXPERTS)[0]


@pytest.fixture
def folder_of_int8(tmp_path: Path) -> ModelFolder:
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    return make_tiny_model("deepseek-v3", tmp_path, **sizes, **ALL_EXPERTS)[0]


def run(
    steps: NativeDecoder | TorchSteps,
    folder: ModelFolder,
    dtype: str,
    cut: Sequence[int],
    computed_dtype: str = "bfloat16",
    adapter: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of the last token, and the KV of all in their order."""
    (group,) = model_layout(
        folder.config, [18], block_size=BLOCK_SIZE, dtype=dtype, computed_dtype=computed_dtype
    ).groups
    pool, done = empty_pool(group.layout), 0
    for num in cut:
        token_ids = PROMPT[done : done + num]
        piece = SequenceSlice(token_ids, done + num, TABLE, True, adapter=adapter)
        done += num
        with torch.inference_mode():
            logits = steps.forward(StepBatch([piece]), [pool]).clone()
    rows = pool.block_rows(torch.tensor([TABLE]))
    kept = [pool.gather(layer, rows, 1)[0, 0, 0] for layer in range(folder.config.num_layers)]
    return logits[0], torch.stack(kept)[:, : len(PROMPT)].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_instruction_set_computes_what_torch_does_however_a_prompt_is_cut(
    folder: ModelFolder, instructions: str, dtype: str
) -> None:
    weights, wide = (
        load_weights(folder.weight_files, folder.config, dtype=each, device=torch.device("cpu"))
        for each in (getattr(torch, dtype), torch.float32)
    )
    expected, expected_kv = run(TorchSteps(folder.config, wide, "fast"), folder, "float32", CUTS[0])
    seen = []
    for cut, num_threads in zip(CUTS, (1, 3, 2), strict=True):
        decoder = NativeDecoder(
            folder.config, weights, num_threads=num_threads, instructions=instructions
        )
        seen.append(run(decoder, folder, dtype, cut))
    for logits, kv in seen:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(kv, seen[0][1])
    tolerance = 1e-4 if dtype == "float32" else 0.1
    logits, kv = seen[0]
    torch.testing.assert_close(kv.float(), expected_kv, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_int8_is_read_from_the_pool_however_a_prompt_is_cut(
    folder_of_int8: ModelFolder, instructions: str, dtype: str
) -> None:
    """Beside torch's int8, and beside fp32 within what 8 bits of a latent may change."""
    folder = folder_of_int8
    weights, wide = (
        load_weights(folder.weight_files, folder.config, dtype=each, device=torch.device("cpu"))
        for each in (getattr(torch, dtype), torch.float32)
    )
    torch_steps = TorchSteps(folder.config, wide, "fast")
    exact, exact_kv = run(torch_steps, folder, "float32", CUTS[0])
    expected, expected_kv = run(torch_steps, folder, "int8", CUTS[0], "float32")
    seen = []
    for cut, num_threads in zip(CUTS, (1, 3, 2), strict=True):
        decoder = NativeDecoder(
            folder.config, weights, num_threads=num_threads, instructions=instructions
        )
        seen.append(run(decoder, folder, "int8", cut, dtype))
    for logits, kv in seen:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(kv, seen[0][1])
    logits, kv = seen[0]
    tolerance = 1e-3 if dtype == "float32" else 0.1
    # Sums that differ in their last bits may be rounded to another number.
    are_close = torch.isclose(kv, expected_kv, rtol=tolerance, atol=tolerance)
    assert are_close.float().mean() >= 0.995
    bound = 0.01 if dtype == "float32" else 0.02
    for found, right in ((logits, exact), (kv, exact_kv), (expected, exact)):
        assert (found - right).norm() <= bound * right.norm()
    tolerance = 1e-4 if dtype == "float32" else 0.02
    of_first_layer = kv[0, :, RANK:], exact_kv[0, :, RANK:]
    torch.testing.assert_close(*of_first_layer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_adapters_of_all_matrices_are_added_as_torch_does(
    folder_of_int8: ModelFolder, instructions: str, dtype: str, tmp_path: Path
) -> None:
    folder, device = folder_of_int8, torch.device("cpu")
    targets = ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    write_adapter(tmp_path / "one", folder.config, target_modules=list(targets), r=5, scale=0.1)
    adapter = describe("one", tmp_path / "one", folder.config)
    (weights, added), (wide, added_wide) = (
        (
            load_weights(folder.weight_files, folder.config, dtype=each, device=device),
            load_lora(adapter, folder.config, rank_max=8, dtype=each, device=device),
        )
        for each in (getattr(torch, dtype), torch.float32)
    )
    reference = TorchSteps(folder.config, wide, "fast")
    base, _ = run(reference, folder, "float32", CUTS[0])
    reference.add_adapter(added_wide)
    cut = CUTS[0], CUTS[2]
    expected, _ = run(reference, folder, "float32", cut[0], adapter=adapter.digest)
    seen = []
    for each, num_threads in zip(cut, (1, 3), strict=True):
        decoder = NativeDecoder(
            folder.config, weights, num_threads=num_threads, instructions=instructions
        )
        decoder.adapters.add(decoder.pack_adapter(added))
        seen.append(run(decoder, folder, dtype, each, adapter=adapter.digest)[0])
    assert torch.equal(*seen)
    bound = 1e-4 if dtype == "float32" else 0.03
    assert (seen[0] - expected).norm() <= bound * expected.norm()
    assert (seen[0] - base).norm() > 0.1 * base.norm()
