"""Reads LoRA adapters that PEFT saved: adapter_config.json and adapter_model.safetensors.

    y = x W^T + scale * (x A^T) B^T     A [rank, in], B [out, rank]
    scale = alpha / rank, or alpha / sqrt(rank) with use_rslora

W is a matrix of the model. The adapter has A, B and alpha.
This module reads names and shapes and does not import torch. An adapter that the engine cannot
compute exactly raises ConfigError or UnsupportedModel, which name the field or the tensor, before
any weight is read. The choice of adapted modules follows PEFT's rules (tuners_utils.py,
get_pattern_key), so an adapter has the same effect as in PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.checkpoint.headers import TensorHeader, read_header
from tandem.models.config.model import ModelConfig
from tandem.models.config.text_part import text_name
from tandem.models.files import few, naming, read_json
from tandem.models.lora.patterns import Pattern, match_all
from tandem.models.lora.targets import checkpoint_name, find_modules, linear_shapes

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1 << 20
_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 20
_DTYPES = ("F32", "F16", "BF16")
# Fields whose values do not affect results.
_NEUTRAL = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",  # settings for one value of `init_lora_weights`
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_READ = {
    "alpha_pattern",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
# Accepted values of `init_lora_weights`. Methods that are not listed change the base model's
# weights.
_INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal")
_PREFIX = "base_model.model."  # prefix of all tensor names in an adapter's weights file
_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "rank_pattern": (dict, "an object of names and ranks"),
    "alpha_pattern": (dict, "an object of names and numbers"),
    "exclude_modules": ((str, list), "a pattern of names, or a list of them"),
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The rank and scale of an adapter for one matrix of the model."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """An adapter's folder that passed the checks against a model. The weights are not read yet."""

    path: Path
    modules: Mapping[str, LoraModule]  # key: a module name, such as model.layers.0.mlp.up_proj
    tensors: Mapping[str, tuple[str, str]]  # module name -> names of A and B in the file
    config: bytes  # contents of adapter_config.json

    @property
    def rank(self) -> int:
        """The largest rank of the adapter's modules."""
        return max(module.rank for module in self.modules.values())

    def digest(self) -> str:
        """Returns a hex digest of the adapter: of `config` and of the current contents of the
        weights file."""
        digest = _begin_digest(self.config)
        with naming(self.path / WEIGHTS_FILE), (self.path / WEIGHTS_FILE).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def read_weights(self) -> tuple[bytes, str]:
        """Returns the contents of the weights file, and the adapter's digest, which is computed
        from the returned contents and not from a second read of the file."""
        with naming(self.path / WEIGHTS_FILE):
            weights = (self.path / WEIGHTS_FILE).read_bytes()
        digest = _begin_digest(self.config)
        digest.update(weights)
        return weights, digest.hexdigest()


def open_lora(path: str, model: ModelConfig, *, rank_max: int) -> LoraFolder:
    """Checks an adapter's config and the header of its weights file against a model.

    Raises ConfigError naming a file that is missing or cannot be read, and UnsupportedModel naming
    the field or tensor that is not supported and the allowed values.
    """
    if model.implementation == "transformers":
        raise ConfigError(
            f"{model.architecture} is computed through transformers, which does not support LoRA "
            "adapters here"
        )
    if model.encoder is not None:
        raise UnsupportedModel("LoRA adapters are not supported for encoders")
    if model.index_keys is not None:
        raise UnsupportedModel("LoRA adapters are not supported for models with sparse attention")
    if model.shared_kv is not None:
        raise UnsupportedModel(
            "LoRA adapters are not supported for models with compressed attention"
        )
    folder = Path(path).expanduser()
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{folder} has no {CONFIG_FILE}; an adapter is a folder that PEFT saved")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS_FILE}; save the adapter as safetensors")
    with naming(file):
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ConfigError(
                f"{file} is larger than the {_CONFIG_BYTES_MAX} bytes that are allowed"
            )
        raw = file.read_bytes()
        modules = read_modules(read_json(file), model)
        ranks = [module.rank for module in modules.values()]
        if max(ranks) > rank_max:
            raise UnsupportedModel(
                f"the adapter has rank {max(ranks)}; max-lora-rank allows at most {rank_max}"
            )
    with naming(folder / WEIGHTS_FILE):
        header = read_header(folder / WEIGHTS_FILE)
        plain = _plain_names(header.tensors, model)
        tensors = _check_header(header.tensors, plain, modules, linear_shapes(model))
    return LoraFolder(folder, modules, tensors, raw)


def read_modules(config: Mapping[str, Any], model: ModelConfig) -> dict[str, LoraModule]:
    """Returns the modules that an adapter_config.json adapts, by name. Raises UnsupportedModel
    naming the field that is not supported."""
    _check_supported(config)
    rank = config.get("r", 8)
    alpha = config.get("lora_alpha", 8)
    names = find_modules(config, model)
    given = [checkpoint_name(model, name) for name in names]
    ranks = _by_pattern(config, "rank_pattern", given, rank)
    alphas = _by_pattern(config, "alpha_pattern", given, alpha)
    modules = {}
    for name, own_rank, own_alpha in zip(names, ranks, alphas, strict=True):
        if type(own_rank) is not int or own_rank < 1:
            raise UnsupportedModel(
                f"the LoRA rank of {name} is {own_rank!r:.80}; it must be an integer of at least 1"
            )
        if type(own_alpha) not in (int, float) or not math.isfinite(own_alpha):
            raise UnsupportedModel(
                f"lora_alpha of {name} is {own_alpha!r:.80}; it must be a number"
            )
        divisor = math.sqrt(own_rank) if config.get("use_rslora") else own_rank
        modules[name] = LoraModule(own_rank, own_alpha / divisor)
    return modules


def _check_supported(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(
            f"peft_type is {config.get('peft_type')!r:.80}, which is not supported; it must be LORA"
        )
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(
            f"bias is {config['bias']!r:.80}, which is not supported; train the adapter with bias "
            "none"
        )
    initialized = config.get("init_lora_weights", True)
    if not any(initialized is allowed or initialized == allowed for allowed in _INITIALIZED):
        raise UnsupportedModel(
            f"init_lora_weights is {initialized!r:.80}, which changes the base model's weights; "
            "save the adapter as a plain LoRA"
        )
    for name, (kinds, allowed) in _TYPES.items():
        if config.get(name) and not isinstance(config[name], kinds):
            raise UnsupportedModel(f"{name} is {config[name]!r:.80}; it must be {allowed}")
    for name in sorted(set(config) - _NEUTRAL - _READ - {"bias"}):
        if config[name]:  # PEFT writes all fields; unused ones are null, false or empty.
            raise UnsupportedModel(f"{name} is {config[name]!r:.80}, which is not supported")


def _by_pattern(
    config: Mapping[str, Any], field: str, names: Sequence[str], default: Any
) -> list[Any]:
    """Returns a value for each name. The config's `field` maps patterns to values. A name gets the
    value of the first pattern that matches the name, or `default` if none matches."""
    given = dict(config.get(field) or {})
    matches = match_all([Pattern.of_end(field, pattern) for pattern in given], names)
    found = [default] * len(names)
    for value, of_names in reversed(list(zip(given.values(), matches, strict=True))):
        for index, match in enumerate(of_names):
            if match is not None:
                found[index] = value
    return found


def _plain_names(stored: Mapping[str, TensorHeader], model: ModelConfig) -> dict[str, str]:
    """Maps PEFT's tensor names, with the names of modules in this package, to the names in the
    file.

    Names in the file may differ in three ways. Old versions of PEFT and some other programs add the
    adapter name `default`. Adapters of multimodal models name modules as the multimodal checkpoint
    does. Some families have other names of modules."""
    found: dict[str, str] = {}
    for name in stored:
        own = re.sub(r"(\.lora_[AB])\.default\.", r"\1.", name).removeprefix(_PREFIX)
        if model.is_text_part:
            own = text_name(own) or own
        for part, ours in model.tensor_names.items():
            own = own.replace(part, ours)
        if (other := found.get(f"{_PREFIX}{own}")) is not None:
            raise UnsupportedModel(f"the tensors {other} and {name} are for the same matrix")
        found[f"{_PREFIX}{own}"] = name
    return found


def _check_header(
    header: Mapping[str, TensorHeader],
    plain: Mapping[str, str],
    modules: Mapping[str, LoraModule],
    linears: Mapping[str, tuple[int, int]],
) -> dict[str, tuple[str, str]]:
    """Returns, by module, the names that the matrices A and B of the module have in the file.
    Raises UnsupportedModel naming tensors that are missing, surplus, or have a wrong shape or
    type."""
    tensors = {}
    expected: dict[str, tuple[int, int]] = {}
    for name, module in modules.items():
        num_out, num_in = linears[name]
        a, b = (f"{_PREFIX}{name}.lora_{part}.weight" for part in "AB")
        expected |= {a: (module.rank, num_in), b: (num_out, module.rank)}
        tensors[name] = plain.get(a, a), plain.get(b, b)
    if surplus := plain.keys() - expected.keys():
        raise UnsupportedModel(
            f"the adapter has unexpected tensors, which {CONFIG_FILE} does not define for this "
            f"model: {few(sorted(surplus))}"
        )
    if missing := expected.keys() - plain.keys():
        raise UnsupportedModel(
            f"the adapter lacks tensors that {CONFIG_FILE} requires: {few(sorted(missing))}"
        )
    for name, shape in expected.items():
        found = header[plain[name]]
        if found.shape != shape:
            raise UnsupportedModel(
                f"{name} has shape {list(found.shape)}; the model and {CONFIG_FILE} imply "
                f"{list(shape)}"
            )
        if found.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{name} has type {found.dtype}; supported are {', '.join(_DTYPES)}"
            )
    return tensors


def _begin_digest(config: bytes) -> blake2b:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    digest.update(len(config).to_bytes(8, "little"))
    digest.update(config)
    return digest
