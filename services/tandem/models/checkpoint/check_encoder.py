"""Checks, from headers alone, that a checkpoint has exactly the tensors of an encoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.headers import FLOATS, read_header
from tandem.models.config.encoder import encoder_shapes, is_unused
from tandem.models.config.model import ModelConfig
from tandem.models.files import few, naming

# Names of the layers' tensors begin with this, unless the checkpoint has only the layers.
_PREFIX = "model."


def check_encoder(files: Sequence[Path], config: ModelConfig) -> Mapping[str, tuple[Path, str]]:
    """Maps the name of each tensor of an encoder to its file and its name there.

    Raises ConfigError naming a file that is truncated or invalid, and UnsupportedModel naming
    tensors that are missing, surplus, or have another shape or type than the config implies.
    """
    assert config.encoder is not None
    shapes = encoder_shapes(config)
    found: dict[str, tuple[Path, str]] = {}
    surplus = []
    for file in files:
        with naming(file):
            for stored, tensor in read_header(file).tensors.items():
                name = stored.removeprefix(_PREFIX)
                if name not in shapes:
                    surplus += [] if is_unused(name, config.encoder) else [stored]
                    continue
                if tensor.shape != shapes[name] or tensor.dtype not in FLOATS:
                    raise UnsupportedModel(
                        f"{stored} has shape {list(tensor.shape)} and type {tensor.dtype}; "
                        f"config.json implies {list(shapes[name])} and a floating-point type"
                    )
                found[name] = (file, stored)
    missing = sorted(shapes.keys() - found.keys())
    if missing or surplus:
        what = f"lacks {few(missing)}" if missing else f"has {few(sorted(surplus))}"
        raise UnsupportedModel(
            f"{files[0].parent}: the checkpoint {what}, unlike the model that config.json describes"
        )
    return found
