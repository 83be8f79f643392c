"""Compares a model of the transformers library on Tandem's KV pools with the model's own result.

The check runs when a worker starts. A model whose attention does something that the pools do not
know is refused by name, instead of giving wrong answers.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import layer_groups, model_layout
from tandem.engine.executor.torch.steps import DecoderSteps
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import UnsupportedModel
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool, make_pool

_PROBE = "tandem_probe"  # name of functions in the library that record a model's attention
# The tokens of two sequences that each step computes, 40 in all.
_STEPS = ((9, 0), (1, 7), (8, 8), (1, 1), (4, 1))
_NUM_TOKENS = [sum(column) for column in zip(*_STEPS, strict=True)]
# Largest difference of a logit in fp32, relative to the largest logit.
_FP32_MAX = 1e-4
# Largest difference of all logits in bfloat16, relative to all logits (Frobenius norms). Products
# are rounded in another order, and a router may choose another one of two equal experts.
_BF16_MAX = 0.05


def check_attention(model: PreTrainedModel, config: ModelConfig) -> None:
    """Records how each layer of the model attends, and compares it with the config. Raises
    UnsupportedModel naming the layer that differs.

    A short text does not show a window, so the comparison of logits would not find a wrong one.
    """
    calls: list[tuple[int, tuple[int | None, int | None], tuple[int, ...], tuple[int, ...]]] = []

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        window, chunk = (
            (None, None) if attention_mask is None else map(int, attention_mask.flatten())
        )
        seen = window or None, chunk or None
        calls.append((int(module.layer_idx), seen, tuple(key.shape[1:]), tuple(value.shape[1:])))  # type: ignore[arg-type]
        return torch.zeros_like(query.transpose(1, 2)), None

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, _describe_mask)
    tokens = torch.tensor([[0, 1]], device=model.device)
    _run(model, _PROBE, tokens)
    if [call[0] for call in calls] != list(range(config.num_layers)):
        raise UnsupportedModel(
            f"{config.architecture} is not supported: each of the {config.num_layers} layers must "
            f"attend exactly once. Layers that attend: {[call[0] for call in calls]!r:.80}"
        )
    shape = (config.num_kv_heads, tokens.shape[1], config.head_dim)
    for (index, seen, keys, values), layer in zip(calls, config.layers, strict=True):
        if keys != shape or values != shape:
            raise UnsupportedModel(
                f"{config.architecture} is not supported: layer {index} has keys of the shape "
                f"{keys} and values of the shape {values}, but the config requires {shape} "
                "(KV heads, tokens, head size)"
            )
        expected = (None, layer.window) if layer.is_chunked else (layer.window, None)
        # A window of the whole context hides nothing.
        actual = tuple(
            None if size is None or size >= config.max_model_len else size for size in seen
        )
        if actual != expected:
            raise UnsupportedModel(
                f"{config.architecture} is not supported: layer {index} has the window and chunk "
                f"{actual}, but the config requires {expected}"
            )


def _describe_mask(
    *,
    mask_function: Callable[..., torch.Tensor | bool],
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """Returns the window and the size of a chunk in place of a mask, [1, 1, 1, 2]. 0 means that
    there is none.

    Token i sees token 1 if the window has i tokens. It is the first token of its chunk if chunks
    have i tokens, and does not see token 1 then.
    """
    sizes = [0, 0]
    if local_size is not None:
        query, key = torch.tensor(local_size, device=device), torch.tensor(1, device=device)
        first = torch.tensor(0, device=device)
        is_window = local_size == 1 or bool(mask_function(first, first, query, key))
        sizes[0 if is_window else 1] = local_size
    return torch.tensor(sizes, device=device).view(1, 1, 1, 2)


@torch.inference_mode()
def check_logits(
    model: PreTrainedModel, config: ModelConfig, steps: DecoderSteps, block_size: int
) -> None:
    """Computes two sequences with `steps`, in chunks, and compares the logits with the model's own
    forward pass. Raises UnsupportedModel if they differ."""
    num_blocks = -(-max(_NUM_TOKENS) // block_size)
    pools = _make_pools(model, config, 2 * num_blocks, block_size)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(config.vocab_size, (num,), generator=generator).tolist()
        for num in _NUM_TOKENS
    ]
    reference = torch.cat(
        [_run(model, "eager", torch.tensor([each], device=model.device)) for each in sequences]
    )
    tables = [list(range(first, first + num_blocks)) for first in (0, num_blocks)]
    rows: list[list[torch.Tensor]] = [[], []]
    computed = [0, 0]
    for lengths in _STEPS:
        batch = []
        for i, num in enumerate(lengths):
            if num:
                tokens = sequences[i][computed[i] : computed[i] + num]
                computed[i] += num
                others = [tables[i]] * (len(pools) - 1)
                batch.append(
                    SequenceSlice(tokens, computed[i], tables[i], True, True, other_tables=others)
                )
        logits = steps.forward(StepBatch(batch), pools)
        for i, part in zip(
            [i for i, num in enumerate(lengths) if num],
            torch.split(logits, [each.num_tokens for each in batch]),
            strict=True,
        ):
            rows[i].append(part.clone())
    actual = torch.cat([*rows[0], *rows[1]])
    if model.dtype == torch.float32:
        difference = float((actual - reference).abs().max() / reference.abs().max().clamp(min=1))
        allowed = _FP32_MAX
    else:
        difference = float((actual - reference).norm() / reference.norm())
        allowed = _BF16_MAX
    if not difference <= allowed:
        raise UnsupportedModel(
            f"{config.architecture} is not supported: paged KV changes the logits of "
            f"{sum(_NUM_TOKENS)} tokens by {difference:.2g}; at most {allowed:g} is allowed"
        )


def _make_pools(
    model: PreTrainedModel, config: ModelConfig, num_blocks: int, block_size: int
) -> list[KvPool]:
    dtype, device = str(model.dtype).removeprefix("torch."), model.device
    sizes = [num_blocks] * len(layer_groups(config))
    layout = model_layout(config, sizes, block_size=block_size, dtype=dtype)
    return [
        make_pool(
            torch.zeros(
                group.layout.num_blocks, group.layout.block_bytes, dtype=torch.uint8, device=device
            ),
            group.layout,
        )
        for group in layout.groups
        if isinstance(group.layout, BlockLayout)  # The config has no layers with states.
    ]


@torch.inference_mode()
def _run(model: PreTrainedModel, attention: str, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits of one sequence, fp32 [T, vocab], with another attention function."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
    return logits
