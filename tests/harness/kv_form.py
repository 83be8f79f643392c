"""The KV that a test of a whole cluster moves: that of the built-in model, or of another one.

Reference answers are the built-in model's with KV in its own data type. A test of any other form
asks for the right answers itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.parity.models import make_random_model


@dataclass(frozen=True)
class KvForm:
    """A model and the data type of its KV."""

    family: str = ""  # of a random model (tests/parity/models.py); empty: the built-in one
    kv_dtype: str = "auto"

    @classmethod
    def from_environment(cls) -> KvForm:
        """Returns the form that CHAOS_MODEL and CHAOS_KV_DTYPE name."""
        environment = os.environ
        return cls(environment.get("CHAOS_MODEL", ""), environment.get("CHAOS_KV_DTYPE", "auto"))

    def __str__(self) -> str:
        return f"{self.family or 'smollm2'} {self.kv_dtype}"

    @property
    def has_references(self) -> bool:
        return self == KvForm()

    @property
    def options(self) -> tuple[str, str]:
        """The options of all workers."""
        return "--kv-dtype", self.kv_dtype

    def model(self, folder: Path) -> str:
        """Returns what `--model` takes; a random model is made in `folder`."""
        if not self.family:
            return "smollm2"
        make_random_model(folder / "model", self.family)
        return str(folder / "model")


GROUPS_AND_INT8 = KvForm("gemma3", "int8")
