"""The model, KV data type and number of ranks that tests of complete clusters use.

Reference answers exist for the built-in model with KV in its own data type. For any other form a
test computes the expected answers itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tandem.models.limits import why_not_tensor_parallel
from tandem.models.source import resolve
from tests.parity.models import make_random_model

_BUILT_IN = "smollm2"
# sizes of the random model that replaces the built-in one if its heads cannot be divided
_DIVISIBLE = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}


@dataclass(frozen=True)
class KvForm:
    """A model, the data type of its KV, and the number of ranks of each worker."""

    family: str = ""  # family of a random model (tests/parity/models.py); empty: the built-in model
    kv_dtype: str = "auto"
    tensor_parallel: int = 1

    @classmethod
    def from_environment(cls) -> KvForm:
        """Reads the form from CHAOS_MODEL, CHAOS_KV_DTYPE and CHAOS_TENSOR_PARALLEL."""
        environment = os.environ
        return cls(
            environment.get("CHAOS_MODEL", ""),
            environment.get("CHAOS_KV_DTYPE", "auto"),
            int(environment.get("CHAOS_TENSOR_PARALLEL", "1")),
        )

    def __str__(self) -> str:
        ranks = f" {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        return f"{self._random_family or _BUILT_IN} {self.kv_dtype}{ranks}"

    @property
    def has_references(self) -> bool:
        return not self._random_family and self.kv_dtype == "auto"

    @property
    def has_states(self) -> bool:
        """True if some layers of the model keep states."""
        return self.family == "qwen3_next"

    @property
    def options(self) -> tuple[str, ...]:
        """Command-line options for all workers."""
        ranks = ("--tensor-parallel", str(self.tensor_parallel)) if self.tensor_parallel > 1 else ()
        return "--kv-dtype", self.kv_dtype, *ranks

    def model(self, folder: Path) -> str:
        """The value of `--model`; a random model is created in `folder`."""
        if not self._random_family:
            return _BUILT_IN
        make_random_model(
            folder / "model", self._random_family, **({} if self.family else _DIVISIBLE)
        )
        return str(folder / "model")

    @property
    def _random_family(self) -> str:
        """The family of the random model; empty: the built-in model."""
        is_divisible = not why_not_tensor_parallel(resolve(_BUILT_IN).config, self.tensor_parallel)
        return self.family or ("" if is_divisible else "llama")


GROUPS_AND_INT8 = KvForm("gemma3", "int8")
