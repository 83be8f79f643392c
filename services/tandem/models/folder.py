"""A model on this machine's disk: its folder, its config and the files of its weights."""

from dataclasses import dataclass
from pathlib import Path

from tandem.models.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this disk. `fingerprint` is the same wherever the same files are."""

    path: Path
    config: ModelConfig
    fingerprint: str  # hex
    name: str  # what it is served as, unless the user says otherwise
    weight_files: tuple[Path, ...]  # safetensors or GGUF, each tensor in one of them
    num_weights: int  # numbers in them, if they are numbers of the config's type or a GGUF's

    @property
    def is_gguf(self) -> bool:
        """True if the weights are in a GGUF file, most of them quantized."""
        return self.weight_files[0].suffix.lower() == ".gguf"
