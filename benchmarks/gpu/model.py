"""The shapes that benchmarks/gpu/kernels.py measures, and random weights for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.executor.weights.decoder_weights import LayerWeights, Linear, Mlp, ModelWeights
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig
from tandem.models.config.rope import Rope


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama and what is asked of it; contexts, prompts and chunks in tokens."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block_size: int
    batch: int
    attention_context: int  # of the attention kernels alone
    step_context: int  # of whole decode steps
    chunks: tuple[int, ...]
    prompt: int  # of the comparison
    made: int
    packed_blocks: int
    copy_bytes: int
    square: int  # of the product that gives the floor
    repeats: int


LLAMA_3_8B = Size(
    layers=32,
    hidden=4096,
    inner=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    block_size=16,
    batch=64,
    attention_context=4096,
    step_context=2048,
    chunks=(512, 1024, 2048, 4096, 8192),
    prompt=512,
    made=64,
    packed_blocks=256,
    copy_bytes=4 << 30,
    square=8192,
    repeats=15,
)

SMOKE = Size(
    layers=2,
    hidden=64,
    inner=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=300,
    block_size=16,
    batch=3,
    attention_context=48,
    step_context=40,
    chunks=(16, 33),
    prompt=20,
    made=3,
    packed_blocks=4,
    copy_bytes=1 << 20,
    square=128,
    repeats=1,
)


def plain(matrix: torch.Tensor) -> Linear:
    return Linear(matrix, None)


def make_weights(
    size: Size, device: torch.device, form: Callable[[torch.Tensor], Linear] | None = None
) -> tuple[ModelConfig, ModelWeights]:
    """Random, bfloat16, scaled so that activations stay finite through all layers. `form` makes the
    matrices of the layers from such numbers; the default keeps them."""
    form = form or plain
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        layers=(LayerSpec(Rope(500_000.0)),) * size.layers,
        num_attention_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm="",
        max_model_len=8192,
        eos_token_ids=(),
        torch_dtype="bfloat16",
    )
    q_size, kv_size = size.heads * size.head_dim, size.kv_heads * size.head_dim

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        empty = torch.empty(num_out, num_in, dtype=torch.bfloat16, device=device)
        return empty.normal_(std=num_in**-0.5)

    def ones() -> torch.Tensor:
        return torch.ones(size.hidden, dtype=torch.bfloat16, device=device)

    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=(form(matrix(q_size + 2 * kv_size, size.hidden)),),
            q_norm=None,
            k_norm=None,
            attention_out=form(matrix(size.hidden, q_size)),
            mlp_norm=ones(),
            mlp=Mlp(
                gate_up=(form(matrix(2 * size.inner, size.hidden)),),
                down=form(matrix(size.hidden, size.inner)),
            ),
        )
        for _ in range(size.layers)
    )
    weights = ModelWeights(
        embedding=matrix(size.vocab, size.hidden),
        layers=layers,
        final_norm=ones(),
        output=matrix(size.vocab, size.hidden),
    )
    return config, weights


def weight_bytes(size: Size) -> int:
    """Returns the bytes of weights that a step reads: all but the embedding, of which it takes a
    few rows."""
    attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.kv_heads)
    layer = attention + 3 * size.hidden * size.inner
    return 2 * (size.layers * layer + size.vocab * size.hidden)
