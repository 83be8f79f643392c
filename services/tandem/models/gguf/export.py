"""Writes a GGUF model as a Hugging Face folder, for programs that cannot read GGUF."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from tandem.errors import UnsupportedModel
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CONVERSION_FILE
from tandem.models.gguf.tensors import read_tensors


def export(model: ModelFolder, folder: Path) -> Path:
    """Writes float32 safetensors and the model's JSON files to `folder`. Writes nothing if the
    folder exists. Returns `folder`.

    Raises UnsupportedModel for a model whose tensors have another form in Hugging Face folders.
    """
    if folder.is_dir():
        return folder
    stored = read_tensors(model.weight_files, model.config)
    if name := next((name for name in stored if _has_other_form(name, model.config)), ""):
        raise UnsupportedModel(
            f"{model.config.architecture} cannot be exported, because {name} has another form in "
            "Hugging Face folders. Models without experts, without latent attention and without "
            "joined matrices of linear attention can be exported"
        )
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in model.path.glob("*.json"):
        shutil.copy(file, unfinished / file.name)
    (unfinished / CONVERSION_FILE).unlink(missing_ok=True)
    wide = {
        model.config.name_in_files(name): blocks.numbers().float().contiguous()
        for name, blocks in stored.items()
    }
    save_file(wide, unfinished / "model.safetensors", metadata={"format": "pt"})
    return unfinished.rename(folder)


def _has_other_form(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor of a GGUF file has another form than in Hugging Face folders."""
    if ".mlp.experts." in name or (config.latent is not None and ".self_attn." in name):
        return True
    is_joined = any(getattr(layer.linear, "form", "") == "joined" for layer in config.layers)
    return is_joined and ".linear_attn." in name
