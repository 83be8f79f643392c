"""Checks, from headers alone, that a checkpoint has exactly the tensors that its config implies.

Loaders read only tensors that passed this check. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.expert_names import CORRECTION, MXFP4_BLOCK, TABLE, Shapes
from tandem.models.checkpoint.headers import FLOATS, Form, TensorHeader, read_header
from tandem.models.checkpoint.kv_scales import place_of_scale
from tandem.models.checkpoint.quantized.forms import forms_of_parts, is_quantized
from tandem.models.checkpoint.weight_shapes import EMBEDDING, OUTPUT, expected_shapes
from tandem.models.config.model import ModelConfig
from tandem.models.files import few, naming
from tandem.models.gguf.names import gguf_names

# Names of the tables of RoPE frequencies that old checkpoints store for each layer. The tables are
# ignored, because the frequencies are computed from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Names of the tensors for multi-token prediction, which are not used.
_MTP = re.compile(r"(?:model\.)?mtp[._].+")

# Name of a GGUF file's config in error messages, in place of "config.json".
_IN_GGUF = "its header"


@dataclass(frozen=True, slots=True)
class _Stored(TensorHeader):
    """The header of a stored tensor, with the file that contains the tensor."""

    file: Path
    name: str  # the tensor's name in `file`, such as blk.0.attn_q.weight in a GGUF file


def check_weights(files: Sequence[Path], config: ModelConfig) -> Shapes:
    """Checks the headers of safetensors or GGUF files against a model's config.

    Returns the shapes of the model's tensors by their Hugging Face names. Raises ConfigError naming
    a file that is truncated or invalid, and UnsupportedModel naming tensors that are missing,
    surplus, or have a shape or type other than the config implies.
    """
    is_gguf = files[0].suffix.lower() == ".gguf"
    with naming(files[0] if len(files) == 1 else files[0].parent):
        stored = (
            _stored_in_gguf(files, config) if is_gguf else _stored_in_safetensors(files, config)
        )
        if config.num_layers > len(stored):
            raise UnsupportedModel(
                f"the checkpoint has only {len(stored)} tensors, too few for the "
                f"{config.num_layers} layers of the config; each layer needs at least one tensor"
            )
        shapes = expected_shapes(config, stored)
        if is_gguf:
            forms = {name: Form((shape,)) for name, shape in shapes.items()}
        else:
            forms = _forms(shapes, stored, config)
        source = _IN_GGUF if is_gguf else "config.json"
        _check_missing(stored, forms, config, source)
        _check_surplus(stored, forms, config, source)
        for name in forms.keys() & stored.keys():
            _check_form(stored[name], forms[name], source)
    return shapes


def _stored_in_safetensors(files: Sequence[Path], config: ModelConfig) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        tensors = read_header(file).tensors
        for own, name in config.names_of(tensors).items():
            stored[own] = _Stored(tensors[name].dtype, tensors[name].shape, file, name)
    return stored


def _stored_in_gguf(files: Sequence[Path], config: ModelConfig) -> dict[str, _Stored]:
    # Imported here because the import is slow and only GGUF files need it.
    from tandem.models.gguf.headers import read_headers

    return {
        name: _Stored(each.type.name, each.shape, each.file, each.name)
        for name, each in read_headers(files, config.architecture).items()
    }


def _forms(
    shapes: Shapes, stored: Mapping[str, TensorHeader], config: ModelConfig
) -> dict[str, Form]:
    """Returns the allowed shapes and types of each tensor in safetensors files, by the tensor's
    stored name. A quantized matrix is stored as several tensors."""
    forms: dict[str, Form] = {}
    for name, shape in shapes.items():
        forms |= _forms_of(name, shape, stored, config)
    if config.tie_word_embeddings:  # Some checkpoints store the tied output matrix, too.
        again = _forms_of(OUTPUT, shapes[EMBEDDING], stored, config)
        first = _forms_of(EMBEDDING, shapes[EMBEDDING], stored, config)
        if again.keys() & stored.keys() and _parts(again) != _parts(first):
            raise UnsupportedModel(
                f"tie_word_embeddings is true, but {OUTPUT} and {EMBEDDING} are different "
                "matrices: only one matrix is quantized. Set tie_word_embeddings to false"
            )
        forms |= {name: replace(form, is_optional=True) for name, form in again.items()}
    return forms


def _parts(forms: Mapping[str, Form]) -> set[str]:
    return {name.rpartition(".")[2] for name in forms}


def _forms_of(
    name: str, shape: tuple[int, ...], stored: Mapping[str, TensorHeader], config: ModelConfig
) -> dict[str, Form]:
    module, _, kind = name.rpartition(".")
    scheme = config.quantization.of(module) if config.quantization else None
    if scheme and kind == "weight" and is_quantized(module, stored, scheme):
        return forms_of_parts(module, shape, stored, scheme)
    if config.is_mxfp4 and len(shape) == 3:  # This tensor has the matrices of all experts.
        *rows, num_in = shape
        blocks = (*rows, num_in // MXFP4_BLOCK)
        return {
            f"{name}_blocks": Form(((*blocks, MXFP4_BLOCK // 2),), ("U8",)),
            f"{name}_scales": Form((blocks,), ("U8",)),
        }
    if kind == TABLE:
        return {name: Form((shape,), ("I64", "I32"))}
    if name.endswith(CORRECTION):  # Ernie 4.5 has one row of numbers.
        return {name: Form((shape, (1, *shape)), FLOATS)}
    return {name: Form((shape,), FLOATS)}


def _check_missing(
    stored: Mapping[str, _Stored], forms: Mapping[str, Form], config: ModelConfig, source: str
) -> None:
    missing = [name for name in forms if not (name in stored or forms[name].is_optional)]
    if not missing:
        return
    shown = []
    for name in missing:
        in_file = (
            gguf_names(name, config.architecture)
            if source == _IN_GGUF
            else [config.name_in_files(name)]
        )
        shown.append(f"{' or '.join(in_file)} of shape {_shown(forms[name])}")
    raise UnsupportedModel(f"the checkpoint lacks {few(shown)}, which {source} requires")


def _check_surplus(
    stored: Mapping[str, _Stored], forms: Mapping[str, Form], config: ModelConfig, source: str
) -> None:
    extra = range(config.num_layers, config.num_layers + config.num_extra_layers)
    left = tuple(f"model.layers.{layer}." for layer in extra)
    # Keys and values of layers that read those of earlier layers.
    left += tuple(
        f"model.layers.{layer}.self_attn.{part}_"
        for layer, spec in enumerate(config.layers)
        if spec.kv_source is not None
        for part in "kv"
    )
    surplus = [
        each.name
        for name, each in stored.items()
        if not (
            name in forms
            or name.startswith(left)
            or _DERIVED.fullmatch(name)
            or _MTP.fullmatch(name)
        )
        if place_of_scale(name) is None
    ]
    if surplus:
        raise UnsupportedModel(
            f"the checkpoint has {few(sorted(surplus))}, but {source} describes a model without "
            "such tensors"
        )


def _check_form(tensor: _Stored, form: Form, source: str) -> None:
    if form.shapes and tensor.shape not in form.shapes:
        raise UnsupportedModel(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}; {source} implies "
            f"{_shown(form)}"
        )
    if form.dtypes and tensor.dtype not in form.dtypes:
        wanted = "a floating-point type" if form.dtypes == FLOATS else form.dtypes[0]
        raise UnsupportedModel(
            f"{tensor.file}: {tensor.name} has type {tensor.dtype}; {source} implies {wanted}"
        )


def _shown(form: Form) -> str:
    return " or ".join(str(list(shape)) for shape in form.shapes)
