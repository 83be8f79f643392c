"""Runs transformers' continuous batching on the same weights, for benchmarks/gpu/kernels.py."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.model import Size
from tandem.engine.executor.weights.decoder_weights import LayerWeights, ModelWeights
from tandem.models.config.model import ModelConfig


def generate_with_transformers(
    size: Size, config: ModelConfig, weights: ModelWeights, device: torch.device
) -> float:
    """Seconds for `size.made` greedy tokens after each of `size.batch` prompts, the second time."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.layers[0].rope.theta},
        max_position_embeddings=config.max_model_len,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(llama)
    rotary = type(model.model.rotary_emb)(llama).to(device)  # on meta its frequencies were lost
    model.load_state_dict(_state(size, weights), assign=True)
    model.model.rotary_emb = rotary
    model.eval()
    wanted = GenerationConfig(
        max_new_tokens=size.made, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Different ones: transformers shares equal prefixes, and this compares without.
    prompts = [[7 + i] * size.prompt for i in range(size.batch)]
    seconds = 0.0
    for _ in range(2):  # the first compiles and records
        started = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=wanted)
        seconds = time.perf_counter() - started
        made = [len(output.generated_tokens) for output in outputs.values()]
        if len(made) != size.batch or set(made) != {size.made}:
            raise RuntimeError(f"transformers made {made} tokens")
    print(f"transformers: {size.batch * size.made / seconds:,.0f} tokens/s")
    return seconds


def _state(size: Size, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Our tensors, or rows of them, under transformers' names; nothing is copied."""
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.output,
    }
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_state(size, layer).items():
            state[f"model.layers.{index}.{name}.weight"] = tensor
    return state


def _layer_state(size: Size, layer: LayerWeights) -> dict[str, torch.Tensor]:
    q_size, kv_size = size.heads * size.head_dim, size.kv_heads * size.head_dim
    q, k, v = layer.qkv[0].weight.split((q_size, kv_size, kv_size))
    gate, up = layer.mlp.gate_up[0].weight.split((size.inner, size.inner))
    return {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": layer.attention_out.weight,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.mlp.down.weight,
    }
