"""Reads the header of a safetensors file, but not the tensor data.

A file consists of the header's length (8 bytes), the header (a JSON object with the type, shape and
offsets of each tensor), and the data.

Format: https://github.com/huggingface/safetensors. A file that the safetensors library would refuse
leads to a ConfigError that names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.models.files import naming

# Floating-point types, which are converted to the compute dtype.
FLOATS = ("F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_HEADER_BYTES_MAX = 100_000_000  # largest header that the safetensors library accepts
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The type and shape of a tensor in a file's header."""

    dtype: str  # name of the type in the file's format, such as BF16
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The shapes and types that a stored tensor may have. An empty tuple of shapes allows every
    shape, and an empty tuple of types allows every type."""

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    raw: bytes  # the JSON text of the header, exactly as in the file
    tensors: Mapping[str, TensorHeader]


def read_header(file: Path) -> Header:
    """Reads a file's header. Raises ConfigError if the file is missing, truncated or invalid."""
    with naming(file), file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        num_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= num_bytes <= min(size - 8, _HEADER_BYTES_MAX):
            raise ConfigError(f"{file} is not a safetensors file, or is cut short")
        raw = stream.read(num_bytes)
        described = dict(json.loads(raw).items())
        described.pop("__metadata__", None)
        tensors = {name: _tensor(name, each) for name, each in described.items()}
        spans = (each["data_offsets"] for each in described.values())
        _check_complete(file, spans, size - 8 - num_bytes)
    return Header(raw, tensors)


def _tensor(name: str, described: Mapping[str, Any]) -> TensorHeader:
    dtype = described["dtype"]
    shape = tuple(described["shape"])
    begin, end = described["data_offsets"]
    if dtype not in _BITS:
        raise ConfigError(f"the tensor {name[:200]} has the unknown type {dtype!r:.80}")
    if any(type(each) is not int or each < 0 for each in (*shape, begin, end)):
        raise ConfigError(
            f"the tensor {name[:200]} has an invalid shape or data_offsets; both must consist of "
            "integers of at least 0"
        )
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise ConfigError(
            f"the tensor {name[:200]} has {end - begin} bytes, which is not the size of type "
            f"{dtype} and shape {list(shape)!s:.80}"
        )
    return TensorHeader(dtype, shape)


def _check_complete(file: Path, spans: Iterable[tuple[int, int]], data_bytes: int) -> None:
    """Raises ConfigError unless the tensors cover the file's data without gaps or overlaps."""
    last = 0
    for begin, end in sorted(spans):
        if begin != last:
            raise ConfigError(f"{file}: tensors overlap or leave a gap at byte {last} of the data")
        last = end
    if last > data_bytes:
        raise ConfigError(
            f"{file} is cut short: its tensors take {last} bytes, but it has only {data_bytes} "
            "bytes of data"
        )
    if last < data_bytes:
        raise ConfigError(
            f"{file} has {data_bytes - last} bytes after its last tensor; it must have none"
        )
