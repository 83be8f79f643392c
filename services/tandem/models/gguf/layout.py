"""Checks the layout of a GGUF file before the gguf package reads it.

The package trusts the counts and lengths in a file: a wrong one makes it loop for hours or fill the
memory. Here each is compared with the bytes that the file really has, in one pass over its
metadata, so that time and memory of a conversion are bounded by the size of the file.

    magic, version, num_tensors, num_keys | keys and values | tensor infos | padding | tensor data

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import gguf

from tandem.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # bytes, unless the file names another
_ALIGNMENT_MAX = 1 << 20
_ALIGNMENT_KEY = b"general.alignment"
_KEYS_MAX = 1 << 16
_TENSORS_MAX = 1 << 16
_DIMS_MAX = 4
_ITEMS_MAX = 1 << 22  # of all arrays; the largest vocabularies need 1.5 million, with their merges

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a GGUF file. Rows of a quantized type are blocks."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # as torch orders it: the numbers of a row last
    begin: int  # in the file
    end: int


def read_layout(path: Path) -> list[StoredTensor]:
    """Returns the tensors of a file. Raises ConfigError saying what is wrong with it and where."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Scan(data).tensors()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error


class _Scan:
    """One pass over a file, from its start. Its methods raise ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._num_items_left = _ITEMS_MAX
        self._alignment = _ALIGNMENT

    def tensors(self) -> list[StoredTensor]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self._uint32()) not in _VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3 are supported, little-endian")
        num_tensors = self._count("tensors", _TENSORS_MAX)
        num_keys = self._count("keys", _KEYS_MAX)
        for _ in range(num_keys):
            self._key_and_value()
        tensors = [self._tensor_info() for _ in range(num_tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        self._check_data(begin, tensors)
        return [replace(each, begin=begin + each.begin, end=begin + each.end) for each in tensors]

    def _key_and_value(self) -> None:
        key = self._string()
        kind = self._uint32()
        if key == _ALIGNMENT_KEY:
            if kind != _UINT32:
                raise ValueError("general.alignment must be of type uint32")
            self._alignment = self._uint32()
            if self._alignment.bit_count() != 1 or self._alignment > _ALIGNMENT_MAX:
                raise ValueError(f"general.alignment is {self._alignment}")
        elif kind == _ARRAY:
            self._array()
        else:
            self._value(kind)

    def _array(self) -> None:
        kind = self._uint32()
        num_items = self._count("items of arrays", self._num_items_left)
        self._num_items_left -= num_items
        if kind in _SCALAR_BYTES:
            self._take(num_items * _SCALAR_BYTES[kind])
            return
        for _ in range(num_items):
            self._value(kind)  # arrays of arrays are refused here: no model has one

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind in _SCALAR_BYTES:
            self._take(_SCALAR_BYTES[kind])
        else:
            raise ValueError(f"a value before byte {self._at} is of the unknown type {kind}")

    def _tensor_info(self) -> StoredTensor:
        """Returns a tensor that starts and ends so many bytes after the start of the data."""
        name = self._string()
        num_dims = self._uint32()
        if not 1 <= num_dims <= _DIMS_MAX:
            raise ValueError(f"the tensor {_shown(name)} has {num_dims} dimensions")
        dims = [self._uint64() for _ in range(num_dims)]
        kind, start = self._uint32(), self._uint64()
        try:
            of_type = gguf.GGMLQuantizationType(kind)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[of_type]
        except (ValueError, KeyError):
            raise ValueError(f"the tensor {_shown(name)} is of the unknown type {kind}") from None
        if 0 in dims or dims[0] % block_size:
            raise ValueError(f"the tensor {_shown(name)} has the impossible shape {dims}")
        end = start + math.prod(dims) // block_size * block_bytes
        return StoredTensor(name.decode(), of_type, tuple(reversed(dims)), start, end)

    def _check_data(self, begin: int, tensors: list[StoredTensor]) -> None:
        last = 0
        for start, end in sorted((tensor.begin, tensor.end) for tensor in tensors):
            if start % self._alignment or start < last:
                raise ValueError(f"the data of two tensors overlap or begin askew at byte {start}")
            last = end
        if begin + last > len(self._data):
            raise ValueError(
                f"its tensors end at byte {begin + last}, and the file at byte {len(self._data)}"
            )

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, within its metadata")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _string(self) -> bytes:
        text = self._take(self._uint64())
        text.decode()  # UnicodeDecodeError is a ValueError
        return text

    def _count(self, what: str, num_max: int) -> int:
        if (count := self._uint64()) > num_max:
            raise ValueError(f"it claims {count} {what}; at most {num_max} are read")
        return count

    def _uint32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _uint64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])


def _shown(name: bytes) -> str:
    return repr(name[:80].decode(errors="replace"))
