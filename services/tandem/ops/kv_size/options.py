"""The options of `tandem kv-size`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from cyclopts import Parameter

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
    """`tandem kv-size` computes the memory of a model's KV, what fits, and the workers of a load.

    It needs no weights and loads no model.
    """

    model: str = field(kw_only=False)
    """Hugging Face folder, config.json alone, GGUF file, smollm2 or hub name."""
    model_revision: Text = ""
    """Commit, tag or branch of a hub model."""
    context: PositiveOrNone = None
    """Number of tokens in a sequence. 0: what the model was trained for."""
    batch: Positive = 1
    """Number of sequences."""
    block_size: Positive = 16
    """Number of tokens in a KV block."""
    kv_dtype: str = "bfloat16"
    """Data type of the KV pool in the tables of attention, ranks and workers."""
    dtype: Computed = "bfloat16"
    """Data type of the computation, in which int8 KV of latent attention keeps rotated keys."""
    tensor_parallel: Annotated[tuple[int, ...], by_comma("N,...", _parse_ranks)] = (1,)
    """Numbers of tensor-parallel ranks; workers have the first of them."""
    memory: NotNegative = 0.0
    """Memory of a device in GiB, of which each rank has one. 0: not computed."""
    weights: Weights = "bfloat16"
    """Data type of the weights in that memory."""
    reserve: NotNegative = 1.0
    """GiB of that memory for activations and libraries."""
    rate: NotNegative = 0.0
    """Requests a second, to compute the number of workers. 0: not computed."""
    prompt: Positive = 1024
    """Number of tokens in each of these requests' prompts."""
    completion: Positive = 256
    """Number of tokens in each of these requests' completions."""
    itl_s: PositiveSeconds = 0.1
    """Service level of the time to each next token, in seconds."""
    rates: Text = ""
    """JSON file of WorkerRates. Default: a guess at an 8B model on one large GPU."""
    json: Switch = False
    """JSON instead of tables."""

    def check_together(self) -> None:
        if self.kv_dtype not in KV_BITS:
            allowed = ", ".join(KV_BITS)
            raise ConfigError(f"kv-dtype is {self.kv_dtype!r}; it must be one of {allowed}")
        if not self.tensor_parallel or min(self.tensor_parallel) < 1:
            raise ConfigError(
                f"tensor-parallel is {','.join(map(str, self.tensor_parallel))!r}; it must be one "
                "or more numbers of at least 1, separated by commas"
            )
