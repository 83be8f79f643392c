"""The options of `tandem kv-size`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter

from tandem.common.config.engine import StateDtype
from tandem.common.dtypes import KV_BITS
from tandem.common.options import (
    NotNegative,
    Options,
    Positive,
    PositiveOrNone,
    PositiveSeconds,
    Switch,
    Text,
    by_comma,
    to_int,
)
from tandem.errors import ConfigError

Computed = Literal["bfloat16", "float32"]
Weights = Literal["bfloat16", "float16", "float32", "int8"]
WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(map(to_int, text.split(",")))


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizeOptions(Options):
    """`tandem kv-size` computes the memory of a model's KV, and the workers that a load needs.

    It needs no weights and loads no model.
    """

    model: str = field(kw_only=False)
    """Model: a Hugging Face folder, its config.json, a GGUF file, smollm2 or a name on the hub."""
    model_revision: Text = ""
    """Commit, tag or branch of a model on the hub."""
    context: PositiveOrNone = None
    """Number of tokens in a sequence. 0: the context length of the model."""
    batch: Positive = 1
    """Number of sequences."""
    block_size: Positive = 16
    """Number of tokens in a KV block."""
    kv_dtype: str = "bfloat16"
    """Data type of the KV pool, for the tables that do not compare data types."""
    state_dtype: StateDtype = "float32"
    """Data type of the states of linear attention."""
    dtype: Computed = "bfloat16"
    """Data type of the computation. With int8 KV, the rotary keys of latent attention are still
    stored in this type."""
    tensor_parallel: Annotated[tuple[int, ...], by_comma("N,...", _parse_ranks)] = (1,)
    """Tensor-parallel degrees to compare, such as 1,2,4. The number of workers for --rate is
    computed for the first degree."""
    memory: NotNegative = 0.0
    """Memory of one device in GiB, to compute how many tokens fit. Each tensor-parallel rank has
    one device. 0: not computed."""
    weights: Weights = "bfloat16"
    """Data type of the weights, which take a part of --memory."""
    reserve: NotNegative = 1.0
    """GiB of --memory that activations and libraries need."""
    rate: NotNegative = 0.0
    """Load in requests per second, to compute how many workers it needs. 0: not computed."""
    prompt: Positive = 1024
    """Number of prompt tokens in each request of --rate."""
    completion: Positive = 256
    """Number of output tokens in each request of --rate."""
    itl_s: PositiveSeconds = 0.1
    """Limit for the time between two tokens, in seconds."""
    rates: Text = ""
    """JSON file with the measured speeds of a worker. Default: a guess for an 8B model on a large
    GPU."""
    json: Switch = False
    """Print JSON instead of tables."""

    def check_together(self) -> None:
        if self.kv_dtype not in KV_BITS:
            allowed = ", ".join(KV_BITS)
            raise ConfigError(f"kv-dtype is {self.kv_dtype!r}; it must be one of {allowed}")
        if not self.tensor_parallel or min(self.tensor_parallel) < 1:
            raise ConfigError(
                f"tensor-parallel is {','.join(map(str, self.tensor_parallel))!r}; it must be one "
                "or more numbers of at least 1, separated by commas"
            )
