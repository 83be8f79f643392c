"""Shapes that hurt, through the native decoder and through torch: also run under sanitizers.

    python -m tests.unit.engine.executor.native.native_shapes [instructions]

computes all of them and compares; it needs no test runner, so that a library can be preloaded.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.common.dtypes import is_quantized
from tandem.common.kv_budget import VisibleKeys
from tandem.engine.cache.layout.kv_groups import layer_groups, model_layout
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.torch.steps import TorchSteps
from tandem.engine.executor.weights.decoder_weights import (
    ExpertWeights,
    LayerWeights,
    Linear,
    Mlp,
    ModelWeights,
)
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.experts import Experts
from tandem.models.config.families import Norms, QkNorm
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import GateClamp, ModelConfig, Multipliers
from tandem.models.config.rope import Rope
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.native import library
from tests.kv_pools import empty_pool
from tests.random_blocks import NATIVE_TYPES, TYPES, random_blocks


@dataclass(frozen=True)
class Shape:
    """A model of two layers, and how its KV is kept."""

    group: int = 3  # queries' heads of a KV head
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 40
    inner: int = 52
    vocab: int = 61
    block_size: int = 16
    bias: bool = False
    qk_norm: QkNorm = ""
    weights: torch.dtype = torch.float32
    kv: str = "float32"
    window: int | None = None
    visible: VisibleKeys | None = None  # of a KV budget, which all sequences have
    num_threads: int = 1
    norms: Norms = "before"
    is_odd: bool = False  # layers that differ, gelu, multipliers and a cap
    experts: int = 0
    has_sinks: bool = False  # and clamped gates
    blocks: tuple[str, ...] = ()  # quantized types, which matrices but routers have in turn; their
    # embedding is the output matrix


BASE = Shape()
QUANTIZED = replace(BASE, hidden=96, inner=160)
QUANTIZED_BY_256 = replace(BASE, hidden=256, inner=512, group=2)
SHAPES = (
    *(replace(BASE, group=group) for group in (1, 2, 4, 5, 7, 8)),
    *(replace(BASE, head_dim=head_dim, num_kv_heads=1) for head_dim in (16, 80, 128, 256)),
    *(replace(BASE, block_size=block_size) for block_size in (1, 8, 12, 64)),
    replace(BASE, hidden=1100, inner=2050, bias=True, num_threads=2),  # inputs in several blocks
    replace(BASE, qk_norm="head", hidden=17, inner=1, vocab=1),
    replace(BASE, qk_norm="all", norms="after", num_threads=2),
    replace(BASE, qk_norm="head", norms="around", window=20, is_odd=True, num_threads=3),
    replace(BASE, experts=5, num_threads=3),
    replace(BASE, experts=9, bias=True, norms="around", is_odd=True, num_threads=2),
    replace(BASE, experts=3, hidden=17, inner=1),
    replace(BASE, experts=3, bias=True, has_sinks=True, window=20, num_threads=2),
    *(replace(BASE, window=window) for window in (1, 20, 64, 100)),
    replace(BASE, visible=VisibleKeys(4, 60)),
    replace(BASE, visible=VisibleKeys(70, 1), window=20, is_odd=True, num_threads=2),
    replace(BASE, weights=torch.bfloat16, num_threads=3),
    replace(BASE, weights=torch.bfloat16, hidden=1100, inner=2050, bias=True, num_threads=2),
    replace(BASE, kv="int8", window=20, is_odd=True),
    replace(BASE, weights=torch.bfloat16, kv="bfloat16", is_odd=True, num_threads=2),
    replace(BASE, weights=torch.bfloat16, norms="around", window=20, is_odd=True, num_threads=2),
    replace(BASE, weights=torch.bfloat16, qk_norm="head", hidden=17, inner=1, vocab=1),
    replace(BASE, weights=torch.bfloat16, group=1, num_kv_heads=3, head_dim=16, vocab=500),
    replace(BASE, kv="bfloat16"),
    replace(BASE, kv="int8"),
    replace(BASE, kv="int8", block_size=12, weights=torch.bfloat16, num_threads=2),
    replace(BASE, kv="fp8_e4m3", window=20, is_odd=True),
    replace(BASE, kv="fp8_e4m3", block_size=12, weights=torch.bfloat16, num_threads=2),
    replace(BASE, kv="k8v4", window=20, is_odd=True),
    replace(BASE, kv="k8v4", block_size=12, weights=torch.bfloat16, num_threads=2),
    replace(BASE, kv="int4", window=20, is_odd=True),
    replace(BASE, kv="int4", block_size=12, weights=torch.bfloat16, num_threads=2),
    *(replace(QUANTIZED, blocks=(name,), bias=name == "Q4_1") for name in TYPES[:5]),
    *(replace(QUANTIZED_BY_256, blocks=(name,)) for name in (*TYPES[5:], *NATIVE_TYPES)),
    replace(QUANTIZED, blocks=("Q4_Z32",), bias=True),
    replace(QUANTIZED_BY_256, blocks=("Q4_Z64", "Q4_Z64", "Q4_0"), num_threads=2),
    replace(QUANTIZED, blocks=("Q5_0", "Q8_0", "Q4_1"), num_threads=2, bias=True),
    replace(QUANTIZED_BY_256, blocks=("Q4_K", "Q6_K", "Q4_K", "Q8_0"), norms="around"),
    replace(QUANTIZED, blocks=("MXFP4",), experts=2, bias=True, has_sinks=True, num_threads=3),
    replace(QUANTIZED, blocks=("Q4_0", "Q8_0", "Q5_1"), experts=2, num_threads=2),
    replace(QUANTIZED_BY_256, blocks=("Q4_Z64", "Q4_Z32"), experts=2, num_threads=2),
)
# Tokens of each sequence in each step, the first ones as a prompt without a prefix.
STEPS = ((1,), (1, 5, 64), (1, 1, 1, 1, 1, 1, 1), (130, 1, 3), (1, 2, 1, 40))


def config_of(shape: Shape) -> ModelConfig:
    experts = Experts(shape.experts, 2, shape.inner, shape.is_odd) if shape.experts else None
    first = LayerSpec(Rope(10000.0), shape.window, experts=experts)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        layers=(first, LayerSpec(Rope(500.0)) if shape.is_odd else first),
        num_attention_heads=shape.group * shape.num_kv_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=shape.bias,
        attention_out_bias=shape.bias,
        mlp_bias=shape.bias,
        qk_norm=shape.qk_norm,
        max_model_len=1500,
        eos_token_ids=(),
        torch_dtype="float32",
        norms=shape.norms,
        activation="gelu_tanh" if shape.is_odd else "silu",
        multipliers=Multipliers(1.5, 0.2, 0.5, 2.0) if shape.is_odd else Multipliers(),
        has_sinks=shape.has_sinks,
        gate_clamp=GateClamp(1.7, 0.8) if shape.has_sinks else None,
        logit_cap=3.0 if shape.is_odd else None,
        attention_cap=2.0 if shape.is_odd else None,
    )


def random_weights(shape: Shape) -> ModelWeights:
    generator = torch.Generator().manual_seed(3)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.weights)

    types = itertools.cycle(shape.blocks)

    def linear(num_out: int, num_in: int, *, is_router: bool = False) -> Linear:
        bias = some(num_out) if shape.bias else None
        if shape.blocks and not is_router:
            blocks = random_blocks(next(types), num_out, num_in)
            return Linear(torch.empty(num_out, num_in, device="meta"), bias, blocks)
        return Linear((some(num_out, num_in).float() / num_in**0.5).to(shape.weights), bias)

    def norms() -> dict[str, torch.Tensor]:
        sizes = {"before": shape.hidden, "after": 0, "around": shape.hidden}
        made = {"attention_norm": sizes[shape.norms], "mlp_norm": sizes[shape.norms]}
        if shape.norms != "before":
            made |= {"attention_post_norm": shape.hidden, "mlp_post_norm": shape.hidden}
        if shape.qk_norm:
            has_all = shape.qk_norm == "all"
            kv_size = (shape.num_kv_heads if has_all else 1) * shape.head_dim
            made |= {"q_norm": kv_size * (shape.group if has_all else 1), "k_norm": kv_size}
        return {name: some(size) for name, size in made.items() if size}

    def mlp() -> Mlp:
        return Mlp(
            gate_up=(linear(shape.inner, shape.hidden), linear(shape.inner, shape.hidden)),
            down=linear(shape.hidden, shape.inner),
        )

    def layer(has_experts: bool) -> LayerWeights:
        q_size, kv_size = shape.group * shape.num_kv_heads, shape.num_kv_heads
        parts = (q_size, kv_size, kv_size)
        return LayerWeights(
            qkv=tuple(linear(heads * shape.head_dim, shape.hidden) for heads in parts),
            attention_out=linear(shape.hidden, q_size * shape.head_dim),
            mlp=ExpertWeights(
                linear(shape.experts, shape.hidden, is_router=True),
                tuple(mlp() for _ in range(shape.experts)),
            )
            if has_experts
            else mlp(),
            sinks=some(q_size) if shape.has_sinks else None,
            **norms(),
        )

    output = linear(shape.vocab, shape.hidden)
    return ModelWeights(
        embedding=output.weight if shape.blocks else some(shape.vocab, shape.hidden),
        embedding_blocks=output.blocks,
        layers=(layer(shape.experts > 0), layer(shape.experts > 0 and not shape.is_odd)),
        final_norm=some(shape.hidden),
        output=output.weight,
        output_blocks=output.blocks,
    )


def widened(weights: ModelWeights) -> ModelWeights:
    """The same numbers in fp32."""

    def linear(part: Linear) -> Linear:
        weight = part.blocks.numbers() if part.blocks else part.weight.float()
        return Linear(weight, None if part.bias is None else part.bias.float())

    def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.float()

    def mlp(w: Mlp) -> Mlp:
        return Mlp(tuple(map(linear, w.gate_up)), linear(w.down))

    def layer(w: LayerWeights) -> LayerWeights:
        return LayerWeights(
            qkv=tuple(map(linear, w.qkv)),
            attention_out=linear(w.attention_out),
            mlp=mlp(w.mlp)
            if isinstance(w.mlp, Mlp)
            else ExpertWeights(linear(w.mlp.router), tuple(map(mlp, w.mlp.mlps))),
            attention_norm=wide(w.attention_norm),
            attention_post_norm=wide(w.attention_post_norm),
            mlp_norm=wide(w.mlp_norm),
            mlp_post_norm=wide(w.mlp_post_norm),
            q_norm=wide(w.q_norm),
            k_norm=wide(w.k_norm),
            sinks=wide(w.sinks),
        )

    output = linear(Linear(weights.output, None, weights.output_blocks))
    return ModelWeights(
        embedding=output.weight if weights.embedding_blocks else weights.embedding.float(),
        layers=tuple(map(layer, weights.layers)),
        final_norm=weights.final_norm.float(),
        output=output.weight,
    )


def batches(shape: Shape) -> list[StepBatch]:
    """STEPS over sequences whose blocks lie anywhere; a new one starts where a step has more."""
    choose = random.Random(1)
    longest, most = sum(max(step) for step in STEPS), max(map(len, STEPS))
    blocks_each = -(-longest // shape.block_size)
    blocks = list(range(most * blocks_each))
    choose.shuffle(blocks)
    done = [0] * most
    num_groups = len(layer_groups(config_of(shape)))
    made = []
    for step in STEPS:
        slices = []
        for i, num_tokens in enumerate(step):
            done[i] += num_tokens
            token_ids = [choose.randrange(shape.vocab) for _ in range(num_tokens)]
            table = blocks[i * blocks_each : (i + 1) * blocks_each]
            others = [table[::-1]] * (num_groups - 1)
            piece = SequenceSlice(token_ids, done[i], table, i != 1, other_tables=others)
            slices.append(piece._replace(visible=shape.visible))
        made.append(StepBatch(slices))
    return made


def cut_otherwise(shape: Shape, sizes: Iterable[int]) -> list[StepBatch]:
    """The second sequence of batches(), alone, with so many tokens of it a step."""
    slices = [batch.slices[1] for batch in batches(shape) if len(batch.slices) > 1]
    token_ids = [token for piece in slices for token in piece.token_ids]
    made, done = [], 0
    for num in sizes:
        part = token_ids[done : done + num]
        done += num
        made.append(StepBatch([SequenceSlice(part, done, slices[-1].block_table, True)]))
    assert done == len(token_ids)
    return made


def pools(shape: Shape, num_blocks: int = 0) -> list[KvPool]:
    """Returns a pool of zeros for each KV group. By default it has as many blocks as `batches`
    name."""
    most = 1 + max(block for b in batches(shape) for s in b.slices for block in s.block_table)
    config = config_of(shape)
    layout = model_layout(
        config,
        [num_blocks or most] * len(layer_groups(config)),
        block_size=shape.block_size,
        dtype=shape.kv,
    )
    return [empty_pool(group.layout) for group in layout.groups]


def pool(shape: Shape, num_blocks: int = 0) -> KvPool:
    """Returns the pool of a shape with one KV group."""
    (only,) = pools(shape, num_blocks)
    return only


def contents(*pools: KvPool) -> torch.Tensor:
    """The numbers of all blocks: [2, layers, blocks, heads, block_size, head_dim]."""
    found = []
    for pool in pools:
        num_blocks = pool.layout.num_blocks
        rows = pool.block_rows(torch.arange(num_blocks).unsqueeze(1))
        found += [pool.gather(layer, rows, num_blocks) for layer in range(pool.layout.num_layers)]
    return torch.stack(found, 1)


def outputs(shape: Shape, instructions: str | None) -> list[torch.Tensor]:
    decoder = NativeDecoder(
        config_of(shape),
        random_weights(shape),
        num_threads=shape.num_threads,
        instructions=instructions,
    )
    kv = pools(shape)
    return [*(decoder.forward(batch, kv).clone() for batch in batches(shape)), contents(*kv)]


def rounds_inputs(shape: Shape, instructions: str | None) -> bool:
    """Returns whether products round their inputs to bf16 where the weights are bf16."""
    found = library.load()
    assert found is not None
    return (
        shape.weights is torch.bfloat16
        and found.packed_kind(library.Kind.BF16, instructions) is library.Kind.BF16_PAIRS
    )


def compare(shape: Shape, instructions: str | None) -> None:
    """Raises AssertionError where logits or KV differ by more than fp32's sums may, or where bf16
    is multiplied as it is, by more than activations rounded to bf16 may."""
    reference = TorchSteps(config_of(shape), widened(random_weights(shape)), "fast")
    kv = pools(shape)
    with torch.inference_mode():
        expected = [*(reference.forward(batch, kv) for batch in batches(shape)), contents(*kv)]
    is_rounded = shape.kv != "float32" or rounds_inputs(shape, instructions)
    tolerance = 3e-2 if is_rounded else 1e-4
    if is_quantized(shape.kv):
        tolerance = 6e-2 if shape.kv == "int8" else 0.25
    *logits, kept = zip(outputs(shape, instructions), expected, strict=True)
    if shape.blocks:  # products round their inputs to int8
        for ours, theirs in (map(torch.cat, zip(*logits, strict=True)), kept):
            assert (ours - theirs).norm() <= 0.03 * theirs.norm()
        return
    for ours, theirs in logits:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    # Sums that differ in their last bits may be rounded to another number, of few bits far off.
    are_close = torch.isclose(*kept, rtol=tolerance, atol=tolerance)
    assert are_close.float().mean() >= (0.995 if is_quantized(shape.kv) else 1.0)


if __name__ == "__main__":
    for each in SHAPES:
        compare(each, sys.argv[1] if len(sys.argv) > 1 else None)
    print(
        len(SHAPES), "shapes agree with", next(Path(library.__file__).parent.glob("_decoder*.so"))
    )
