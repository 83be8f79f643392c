"""LoRA adapters in PEFT's format with random weights, and models with merged adapters."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tandem.common.adapter import Adapter
from tandem.models.config.model import ModelConfig
from tandem.models.lora.adapter import open_lora
from tandem.models.lora.targets import checkpoint_name, linear_shapes

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# fields that PEFT 0.17 writes in addition to an adapter's settings
_DEFAULTS: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": list(ATTENTION),
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


# Parts of names in checkpoints, and those of transformers' modules.
_MODULES = {
    "backbone.": "model.",  # Nemotron-H
    "self_attn.f_": "self_attn.forget_gate.f_",  # Kimi Linear
    "block_sparse_moe.": "mlp.",
}


def write_adapter(
    path: Path,
    model: ModelConfig,
    *,
    seed: int = 1,
    modules: Sequence[str] | None = None,
    scale: float = 0.15,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Writes an adapter with random weights. Returns A and B by the module's name.

    `modules` are suffixes of the names of modules that have weights; None: those of
    `target_modules`. `ranks` are for modules whose rank differs from `r`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = _DEFAULTS | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    if modules is None:
        modules = config["target_modules"]
    ends = ("",) if modules == "all-linear" else tuple(modules)
    made, stored = {}, {}
    for own_name, (num_out, num_in) in linear_shapes(model).items():
        name = checkpoint_name(model, own_name)
        if not name.endswith(ends):
            continue
        rank = next((r for end, r in (ranks or {}).items() if name.endswith(end)), config["r"])
        a = torch.randn(rank, num_in, generator=random) * scale
        b = torch.randn(num_out, rank, generator=random) * scale
        made[name] = a.to(dtype), b.to(dtype)
        for part, tensor in zip("AB", made[name], strict=True):
            stored[f"base_model.model.{name}.lora_{part}.weight"] = tensor
    save_file(stored, path / "adapter_model.safetensors")
    return made


def describe(name: str, path: Path, model: ModelConfig) -> Adapter:
    """Builds the adapter's description as reported by a worker."""
    folder = open_lora(str(path), model, rank_max=512)
    return Adapter(name, folder.digest(), str(path), folder.rank)


def scale_of(rank: int, alpha: float, *, use_rslora: bool = False) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


@torch.no_grad()
def merged(
    model: PreTrainedModel,
    made: dict[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    alpha: float = 16,
    use_rslora: bool = False,
) -> PreTrainedModel:
    """Copies a model and adds an adapter to its weights."""
    copied = copy.deepcopy(model)
    for name, (a, b) in made.items():
        scale = scale_of(a.shape[0], alpha, use_rslora=use_rslora)
        # transformers' names of modules whose weights have other names in checkpoints
        for in_file, own in _MODULES.items():
            name = name.replace(in_file, own)
        module = copied.get_submodule(name)
        module.weight += scale * (b.float() @ a.float())
    return copied
