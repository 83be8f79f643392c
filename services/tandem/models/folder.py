"""A model on this machine's disk: its folder, config and weight files."""

from dataclasses import dataclass
from pathlib import Path

from tandem.models.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine's disk. Equal files give an equal `fingerprint` on every machine."""

    path: Path
    config: ModelConfig
    fingerprint: str  # hexadecimal hash of the model's files
    name: str  # name under which the model is served by default
    weight_files: tuple[Path, ...]  # safetensors or GGUF; each tensor is in exactly one file
    # Number of parameters; valid only for unquantized checkpoints and for GGUF files.
    num_weights: int

    @property
    def is_gguf(self) -> bool:
        """True if the weights are in GGUF files; most of these are quantized."""
        return self.weight_files[0].suffix.lower() == ".gguf"
