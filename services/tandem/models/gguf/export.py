"""Writes a GGUF model as a Hugging Face folder, for programs that cannot read GGUF."""

import shutil
from pathlib import Path

from safetensors.torch import save_file

from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CONVERSION_FILE
from tandem.models.gguf.tensors import read_tensors


def export(model: ModelFolder, folder: Path) -> Path:
    """Writes float32 safetensors and the model's JSON files to `folder`. Writes nothing if the
    folder exists. Returns `folder`."""
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in model.path.glob("*.json"):
        shutil.copy(file, unfinished / file.name)
    (unfinished / CONVERSION_FILE).unlink(missing_ok=True)
    stored = read_tensors(model.weight_files, model.config)
    wide = {name: blocks.numbers().float().contiguous() for name, blocks in stored.items()}
    save_file(wide, unfinished / "model.safetensors", metadata={"format": "pt"})
    return unfinished.rename(folder)
