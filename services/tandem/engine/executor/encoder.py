"""Computes an encoder (ModernBERT) with torch, on any device.

A token of an encoder attends to later tokens, too, so a text can only be computed as a whole, and
there is no KV. A step with the last token of a prompt computes the whole prompt. The pool has the
ids of the tokens in the place of keys, so that all else works as for a decoder: chunks of prompts,
blocks that are reused, pulled from peers or copied to tiers, preemption.

    step of an earlier chunk   writes the ids of its tokens to the pool
    step of the last chunk     does so, too, reads all ids of the prompt, and computes its state

The logits, from which the engine samples a token that no client gets, are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional

from tandem.engine.executor.torch.inputs import StepInputs
from tandem.engine.executor.torch.lora import StepLora
from tandem.engine.executor.torch.steps import DecoderSteps
from tandem.engine.executor.weights.load import OnProgress
from tandem.models.checkpoint.check_encoder import check_encoder
from tandem.models.config.encoder import ID_DIGIT_BITS, ID_DIGITS
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.folder import ModelFolder
from tandem_kernels.attention_groups import QuerySpan
from tandem_kernels.dispatch import kernels_for
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.state_pool import Pool, without_states


def encoder_steps(
    folder: ModelFolder,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
) -> DecoderSteps:
    """Loads an encoder. Raises the errors of `check_encoder`."""
    weights = {}
    for name, (file, stored) in check_encoder(folder.weight_files, config).items():
        with naming(file), safe_open(file, "pt") as tensors:
            weights[name] = tensors.get_tensor(stored).to(device, dtype)
    num_bytes = sum(file.stat().st_size for file in folder.weight_files)
    on_progress(num_bytes, num_bytes)
    return DecoderSteps(TextEncoder(config, weights), kernels_for(device.type, "fast"))


class TextEncoder:
    """An encoder with the interface of a decoder."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        assert config.encoder is not None
        self._encoder = config.encoder
        self._vocab_size = config.vocab_size
        self._weights = weights
        embedding = weights["embeddings.tok_embeddings.weight"]
        self.final_hidden = embedding.new_empty(0, config.hidden_size)
        self._digits = torch.arange(ID_DIGITS, device=embedding.device) * ID_DIGIT_BITS

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[Pool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step as `Decoder.forward` does. `lora` must have no adapters. Afterwards,
        `final_hidden` has the state of the text that ends with the token of each row of logits."""
        assert not inputs.adapted
        (pool,) = without_states(pools)
        ids = inputs.token_ids[: inputs.num_tokens]
        mask = (1 << ID_DIGIT_BITS) - 1
        digits = (ids.unsqueeze(-1) >> self._digits & mask).unsqueeze(1)
        pool.write(0, inputs.token_rows[0], digits, torch.zeros_like(digits))
        if on_kv_written is not None:
            on_kv_written()
        states = [self.final_hidden[:0]]
        for row in inputs.logit_rows.tolist():
            spans = inputs.spans[0]
            span = next(s for s in spans if s.first_row <= row < s.first_row + s.num_queries)
            num_tokens = span.context_len - span.num_queries + row - span.first_row + 1
            states.append(self.state(self._ids(pool, span, num_tokens)).unsqueeze(0))
        self.final_hidden = torch.cat(states)
        return torch.zeros(len(states) - 1, self._vocab_size, device=ids.device)

    def _ids(self, pool: KvPool, span: QuerySpan, num_tokens: int) -> torch.Tensor:
        """Reads the ids of the first tokens of a sequence from the pool: [T]."""
        num_blocks = -(-num_tokens // pool.block_size)
        table = torch.tensor([list(span.block_table[:num_blocks])], device=pool.device)
        digits = pool.gather(0, pool.block_rows(table), 1)[0, 0, 0, :num_tokens]
        return (digits.long() << self._digits).sum(-1)

    def state(self, ids: torch.Tensor) -> torch.Tensor:
        """Computes the state of a text of T tokens, `ids` [T]: [hidden]."""
        encoder = self._encoder
        ropes = {
            is_local: self._rope(len(ids), encoder.local_theta if is_local else encoder.theta)
            for is_local in set(encoder.are_local)
        }
        reach = _within(encoder.reach, len(ids), ids.device) if True in ropes else None
        x = self._norm("embeddings.norm", self._weights["embeddings.tok_embeddings.weight"][ids])
        for layer, is_local in enumerate(encoder.are_local):
            name = f"layers.{layer}"
            inner = self._norm(f"{name}.attn_norm", x) if layer else x
            x = x + self._attention(name, inner, ropes[is_local], reach if is_local else None)
            inner = self._norm(f"{name}.mlp_norm", x)
            up, gate = self._linear(f"{name}.mlp.Wi", inner).chunk(2, dim=-1)
            x = x + self._linear(f"{name}.mlp.Wo", functional.gelu(up) * gate)
        x = self._norm("final_norm", x)
        pooled = x[0] if encoder.pooling == "cls" else x.mean(0)
        if not encoder.has_head:
            return pooled
        return self._norm("head.norm", functional.gelu(self._linear("head.dense", pooled)))

    def _attention(
        self,
        name: str,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """x is [T, hidden]; `mask` is bool [T, T], true where a token attends to another."""
        qkv = self._linear(f"{name}.attn.Wqkv", x)
        q, k, v = qkv.view(len(x), 3, self._encoder.num_heads, -1).permute(1, 2, 0, 3)
        q, k = _rotated(q, *rope), _rotated(k, *rope)
        attended = functional.scaled_dot_product_attention(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask
        )
        return self._linear(f"{name}.attn.Wo", attended[0].transpose(0, 1).flatten(1))

    def _rope(self, num_tokens: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines of positions, each [T, head_dim]."""
        embedding = self._weights["embeddings.tok_embeddings.weight"]
        dim = embedding.shape[1] // self._encoder.num_heads
        options: dict[str, Any] = {"dtype": torch.float32, "device": embedding.device}
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, **options) / dim)
        angles = torch.arange(num_tokens, **options).unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(embedding.dtype), angles.sin().to(embedding.dtype)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        )

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return functional.layer_norm(x, weight.shape, weight, bias, self._encoder.norm_eps)


def _within(reach: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Returns bool [T, T], true where two tokens are at a distance of at most `reach`."""
    places = torch.arange(num_tokens, device=device)
    return (places.unsqueeze(0) - places.unsqueeze(1)).abs() <= reach


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to [heads, T, D]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
