"""How many kernels a decode step launches: Triton's, and torch's operations that are not views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.triton import attention, latent
from tandem.engine.executor.triton.experts import StackedExperts
from tandem.engine.executor.triton.products import product
from tandem.engine.executor.weights.decoder_weights import ExpertWeights, Linear, Mlp, Quantized
from tandem.engine.scheduler.batch import StepBatch
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups, by_columns
from tandem_kernels.triton import packed_linear
from tandem_kernels.triton.activation import gated_mul
from tests.random_blocks import TYPES, random_blocks
from tests.step_batches import place
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts the launches of Triton's interpreter"
)

PRODUCT_MAX = 5
DENSE_LAYER_MAX = 12
EXPERTS_MAX = 5  # without the router and the choice of experts
EXPERT_LAYER_MAX = 14
NUM_IN, NUM_OUT = 2048, 70
FIRST = ("_rotate_and_store", "_norm_and_store_latents")
ATTENTION = ("_attend_split", "_attend_latent_split")
_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view"}


class _Operations(TorchDispatchMode):
    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returned = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if not is_view and name not in _ALLOCATIONS:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the list of launches, which grows inside the context. Kernels choose their launches
    as on a card of 132 multiprocessors."""
    launched: list[str] = []
    run = GridExecutor.__call__

    def run_counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        for module in (attention, latent, packed_linear):
            patch.setattr(module, "num_multiprocessors", lambda device: 132)
        patch.setattr(GridExecutor, "__call__", run_counted)
        with _Operations(launched):
            yield launched


def test_views_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 6)
    with counted(monkeypatch) as launched:
        part = x[:2].view(3, 4).t()
        x.new_empty(3)
        assert not launched
        part.add_(1.0)
        torch.cat([part, part])
        x.float()  # is no copy
        gated_mul(x)
    assert launched == ["add_", "cat", "_gated_mul"]


def weights(name: str) -> Quantized:
    """A matrix [NUM_OUT, NUM_IN] in a quantized format."""
    chance = torch.Generator().manual_seed(1)
    if name.startswith("fp8"):
        runs = {"fp8 by outputs": 1, "fp8 by blocks": NUM_IN // 128}[name]
        numbers = torch.randn(NUM_OUT, NUM_IN, generator=chance).to(torch.float8_e4m3fn)
        return Fp8(numbers, by_columns(torch.rand(NUM_OUT, runs, generator=chance)))
    if name.startswith("int4"):
        numbers = torch.randint(0, 16, (NUM_OUT, NUM_IN), generator=chance).byte()
        scales = torch.rand(NUM_OUT, NUM_IN // 128, generator=chance).half()
        zeros = torch.randint(0, 16, scales.shape, generator=chance).byte()
        groups = torch.randperm(NUM_IN, generator=chance) // 128
        in_order = name == "int4 in the order of activations"
        packed = PackedGroups.of(numbers, scales, zeros, groups if in_order else None)
        assert packed is not None
        return packed
    return PackedGroups.of_blocks(random_blocks(name, NUM_OUT, NUM_IN))


@pytest.mark.parametrize(
    "name",
    ["fp8 by outputs", "fp8 by blocks", "int4", "int4 in the order of activations", *TYPES],
)
def test_a_quantized_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = weights(name)
    matrix = Linear(torch.empty(NUM_OUT, NUM_IN, device="meta"), torch.ones(NUM_OUT), blocks)
    x = torch.randn(1, NUM_IN, generator=torch.Generator().manual_seed(2))
    with counted(monkeypatch) as launched:
        found = product(x, matrix)
    torch.testing.assert_close(found, x @ blocks.numbers().t() + 1.0, rtol=1e-3, atol=1e-3)
    assert len(launched) <= PRODUCT_MAX, launched


def test_quantized_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(num_out: int, num_in: int, seed: int) -> Linear:
        blocks = random_blocks("MXFP4", num_out, num_in, seed)
        return Linear(torch.empty(num_out, num_in, device="meta"), torch.ones(num_out), blocks)

    mlps = tuple(Mlp((linear(128, 96, i),), linear(96, 64, 9 + i)) for i in range(4))
    experts = StackedExperts.of(ExpertWeights(Linear(torch.empty(4, 96), None), mlps))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([[0, 2], [2, 3], [3, 0]])
    shares = torch.full(chosen.shape, 0.5)
    with counted(monkeypatch) as launched:
        found = experts.mix(x, chosen, shares, gated_mul, None)
    expected = torch.zeros_like(x)
    for token, choice in enumerate(chosen.tolist()):
        for expert in choice:
            mlp = mlps[expert]
            gate_up, down = (each.blocks for each in (mlp.gate_up[0], mlp.down))
            assert gate_up is not None
            assert down is not None
            gate, up = (x[token] @ gate_up.numbers().t() + 1.0).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += 0.5 * (inner @ down.numbers().t() + 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(launched) <= EXPERTS_MAX, launched


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "olmo2",
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("granite", "gemma2", "qwen3", "smollm3", "phi3", "llama-linear-biases")
        ),
    ],
)
def test_a_dense_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(family, tmp_path, monkeypatch):
        assert len(layer) <= DENSE_LAYER_MAX, " ".join(layer)


@pytest.mark.parametrize(
    "family", ["deepseek-v3", pytest.param("deepseek-v2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("num_seqs", [1, 2])
def test_a_dense_layer_with_latent_attention(
    family: str, num_seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = {"first_k_dense_replace": 3}
    for layer in layers_of(family, tmp_path, monkeypatch, num_seqs=num_seqs, **dense):
        assert len(layer) <= DENSE_LAYER_MAX, " ".join(layer)


@pytest.mark.parametrize("family", ["granite4-dense", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_dense_layer_with_a_state(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "conv" if family == "lfm2" else "linear_attention"
    kinds = {"num_hidden_layers": 3, "layer_types": [kind, kind, "full_attention"]}
    launched = launches_of(family, tmp_path, monkeypatch, **kinds)
    first, second = (at for at, name in enumerate(launched) if name == "_convolve")
    layer = launched[first:second]
    assert len(layer) <= DENSE_LAYER_MAX, " ".join(layer)
    assert "_keep_last" not in layer


@pytest.mark.parametrize("family", ["gpt-oss", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_layer_of_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in layers_of(family, tmp_path, monkeypatch):
        assert len(layer) <= EXPERT_LAYER_MAX, layer


def layers_of(
    family: str, path: Path, monkeypatch: pytest.MonkeyPatch, *, num_seqs: int = 1, **changes: Any
) -> list[list[str]]:
    """Returns the launches of each layer but the last in a decode step, from the layer's first
    launch after its products of q, k and v to the same of the next layer."""
    launched = launches_of(family, path, monkeypatch, num_seqs=num_seqs, **changes)
    firsts = [at for at, name in enumerate(launched) if name in FIRST]
    assert len(firsts) == 3
    layers = [launched[first:end] for first, end in pairwise(firsts)]
    assert all(sum(name in ATTENTION for name in layer) == 1 for layer in layers)
    return layers


def launches_of(
    family: str, path: Path, monkeypatch: pytest.MonkeyPatch, *, num_seqs: int = 1, **changes: Any
) -> list[str]:
    """Returns the launches of a decode step.

    Like on a card, q, k and v are one matrix: they are copied, because the file has another dtype.
    """
    folder, _ = make_tiny_model(family, path, **changes)
    config = EngineConfig(
        model=str(folder.path), dtype="bfloat16", block_size=8, max_num_seqs=2, max_model_len=512
    )
    runner = ModelRunner(folder, replace(config, kernels="triton"))
    sequences = place(runner, [[1, 2, 3, 4]] * num_seqs)
    runner.forward(StepBatch([sequence.take(3) for sequence in sequences]))
    with counted(monkeypatch) as launched:
        runner.forward(StepBatch([sequence.take(1) for sequence in sequences]))
    return launched
