"""The model and KV data type that tests of complete clusters use.

Reference answers exist for the built-in model with KV in its own data type. For any other form a
test computes the expected answers itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.parity.models import make_random_model


@dataclass(frozen=True)
class KvForm:
    """A model and the data type of its KV."""

    family: str = ""  # family of a random model (tests/parity/models.py); empty: the built-in model
    kv_dtype: str = "auto"

    @classmethod
    def from_environment(cls) -> KvForm:
        """Reads the form from CHAOS_MODEL and CHAOS_KV_DTYPE."""
        environment = os.environ
        return cls(environment.get("CHAOS_MODEL", ""), environment.get("CHAOS_KV_DTYPE", "auto"))

    def __str__(self) -> str:
        return f"{self.family or 'smollm2'} {self.kv_dtype}"

    @property
    def has_references(self) -> bool:
        return self == KvForm()

    @property
    def options(self) -> tuple[str, str]:
        """Command-line options for all workers."""
        return "--kv-dtype", self.kv_dtype

    def model(self, folder: Path) -> str:
        """The value of `--model`; a random model is created in `folder`."""
        if not self.family:
            return "smollm2"
        make_random_model(folder / "model", self.family)
        return str(folder / "model")


GROUPS_AND_INT8 = KvForm("gemma3", "int8")
