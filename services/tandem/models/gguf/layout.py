"""Reads the keys of a GGUF file and the locations of its tensors, in one pass.

The reader in the package gguf trusts the counts and lengths in a file, so a wrong count can make
the reader run for hours or exhaust memory. That reader also keeps four numpy views of each string,
which take a gigabyte for a large vocabulary. The reader of this module checks each count against
the size of the file, so the time and memory of a read are limited. A file consists of:

    magic, version, num_tensors, num_keys | keys and values | tensor infos | padding | tensor data

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf

from tandem.errors import ConfigError
from tandem.models.files import naming

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # alignment of tensor data in bytes if general.alignment is absent
_ALIGNMENT_MAX = 1 << 20
_ALIGNMENT_KEY = "general.alignment"
_KEYS_MAX = 1 << 16
_TENSORS_MAX = 1 << 16
_DIMS_MAX = 4
# Maximum sum of the lengths of all arrays in a file. The largest vocabularies with their merges
# have 1.5 million items.
_ITEMS_MAX = 1 << 22

_UINT32 = 4
_STRING = 8
_ARRAY = 9
# Number of a type in GGUF files -> format character of this type in Python's struct module.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_SIZE_BYTES = 8  # each string is preceded by its length, a number of 8 bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header and location of a tensor in a GGUF file."""

    file: Path
    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # sizes in torch's order: (rows, length of a row) for a matrix
    begin: int  # offset in the file of the tensor's first byte
    end: int  # offset in the file of the byte after the tensor's last one


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys and tensor headers of a GGUF file."""

    tensors: list[StoredTensor]
    keys: Mapping[str, Any]  # key -> value: a number, a string, a boolean, or a list of these


def read_layout(path: Path, *, skips_strings: bool = False) -> Layout:
    """Reads a file's layout. Raises ConfigError with the fault and its location in the file.

    With `skips_strings`, lists of strings are empty. A vocabulary has hundreds of thousands of
    strings, and decoding them takes most of the time.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Scan(path, data, skips_strings).layout()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file.
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error


def read_parts(files: Sequence[Path], *, skips_strings: bool = False) -> Layout:
    """Reads the files of a split model. Keys come from the first file, tensor headers from all.

    Raises ConfigError naming a file that is truncated or invalid, or in which the part number
    differs from the number in the file's name."""
    layouts = [read_layout(file, skips_strings=skips_strings) for file in files]
    for number, (file, layout) in enumerate(zip(files, layouts, strict=True)):
        with naming(file):
            _check_part(layout, number, len(files))
    tensors = [tensor for layout in layouts for tensor in layout.tensors]
    stated = layouts[0].keys.get("split.tensors.count", len(tensors))
    if len(files) > 1 and stated != len(tensors):
        raise ConfigError(
            f"{files[0]}: split.tensors.count is {stated!r:.80}, but the {len(files)} parts have "
            f"{len(tensors)} tensors together"
        )
    return Layout(tensors, layouts[0].keys)


def _check_part(layout: Layout, number: int, count: int) -> None:
    stated = layout.keys.get("split.count", 0)
    if count == 1 and stated in (0, 1):
        return
    if count == 1:
        raise ConfigError(
            f"the file is one of {stated!r:.80} files of a model. Join the files with "
            "llama-gguf-split --merge, or give each file a name like "
            "NAME-00001-of-00003.gguf"
        )
    if stated != count:
        raise ConfigError(
            f"split.count is {stated!r:.80}; it must be {count}, the number of parts in the "
            "file's name"
        )
    if (found := layout.keys.get("split.no")) != number:
        raise ConfigError(
            f"split.no is {found!r:.80}; it must be {number}. The file's name says part "
            f"{number + 1} of {count}, and split.no counts from 0"
        )


class _Scan:
    """Reads a file once from start to end. The methods raise ValueError for an invalid file."""

    def __init__(self, file: Path, data: mmap.mmap, skips_strings: bool) -> None:
        self._file = file
        self._data = data
        self._skips_strings = skips_strings
        self._at = 0
        self._num_items_left = _ITEMS_MAX
        self._alignment = _ALIGNMENT

    def layout(self) -> Layout:
        if self._take(4) != _MAGIC:
            raise ValueError("the file does not begin with the bytes GGUF")
        self._check_version(self._take(4))
        num_tensors = self._count("tensors", _TENSORS_MAX)
        num_keys = self._count("keys", _KEYS_MAX)
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            key, value = self._key_and_value()
            if key in keys:
                raise ValueError(f"the file has the key {_shown(key)} twice")
            keys[key] = value
        tensors = [self._tensor_info() for _ in range(num_tensors)]
        begin = -(-self._at // self._alignment) * self._alignment
        self._check_data(begin, tensors)
        placed = [replace(each, begin=begin + each.begin, end=begin + each.end) for each in tensors]
        return Layout(placed, keys)

    def _check_version(self, version: bytes) -> None:
        if int.from_bytes(version, "big") in _VERSIONS:
            raise ValueError(
                "the file is big-endian, but only little-endian files are supported. Convert "
                "the file with gguf-convert-endian of the gguf package"
            )
        if (number := int.from_bytes(version, "little")) not in _VERSIONS:
            raise ValueError(f"the file's GGUF version is {number}; versions 2 and 3 are supported")

    def _key_and_value(self) -> tuple[str, Any]:
        key = self._string()
        kind = self._uint32()
        if key == _ALIGNMENT_KEY:
            if kind != _UINT32:
                raise ValueError("general.alignment must be of type uint32")
            self._alignment = self._uint32()
            if self._alignment.bit_count() != 1 or self._alignment > _ALIGNMENT_MAX:
                raise ValueError(
                    f"general.alignment is {self._alignment}; it must be a power of 2 and at most "
                    f"{_ALIGNMENT_MAX}"
                )
            return key, self._alignment
        if kind == _ARRAY:
            return key, self._array()
        if kind == _STRING:
            return key, self._string()
        return key, self._numbers(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind = self._uint32()
        num_items = self._count("items of arrays", self._num_items_left)
        self._num_items_left -= num_items
        if kind == _STRING:
            return (
                self._skip_strings(num_items) if self._skips_strings else self._strings(num_items)
            )
        # This call raises ValueError for an array of arrays, which no model has.
        return self._numbers(kind, num_items)

    def _numbers(self, kind: int, num: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"a value before byte {self._at} has the unknown type {kind}")
        form = f"<{num}{_SCALARS[kind]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def _tensor_info(self) -> StoredTensor:
        """Reads a tensor's header. `begin` and `end` are relative to the start of the tensor
        data."""
        name = self._string()
        num_dims = self._uint32()
        if not 1 <= num_dims <= _DIMS_MAX:
            raise ValueError(
                f"the tensor {_shown(name)} has {num_dims} dimensions; it must have from 1 to "
                f"{_DIMS_MAX}"
            )
        dims = [self._uint64() for _ in range(num_dims)]
        kind = self._uint32()
        start = self._uint64()
        try:
            of_type = gguf.GGMLQuantizationType(kind)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[of_type]
        except (ValueError, KeyError):
            raise ValueError(f"the tensor {_shown(name)} has the unknown type {kind}") from None
        if 0 in dims or dims[0] % block_size:
            raise ValueError(
                f"the tensor {_shown(name)} has the invalid shape {dims}. Each dimension must "
                f"be at least 1, and the first dimension must be a multiple of {block_size}"
            )
        end = start + math.prod(dims) // block_size * block_bytes
        return StoredTensor(self._file, name, of_type, tuple(reversed(dims)), start, end)

    def _check_data(self, begin: int, tensors: list[StoredTensor]) -> None:
        last = 0
        for start, end in sorted((tensor.begin, tensor.end) for tensor in tensors):
            if start % self._alignment or start < last:
                raise ValueError(
                    f"the tensor data at byte {start} overlaps the data before it, or does not "
                    f"begin at a multiple of {self._alignment} bytes"
                )
            last = end
        if tensors and begin + last > len(self._data):
            raise ValueError(
                f"the file is cut short: its tensors end at byte {begin + last}, but the file "
                f"ends at byte {len(self._data)}"
            )

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise self._cut_short()
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _string(self) -> str:
        # Raises UnicodeDecodeError, which is a ValueError.
        return self._take(self._uint64()).decode()

    def _strings(self, num: int) -> list[str]:
        """Reads `num` strings. For large vocabularies, this loop takes most of the time."""
        data = self._data
        at = self._at
        found = []
        for _ in range(num):
            begin = at + _SIZE_BYTES
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > len(data):
                break
            found.append(data[begin:at].decode())
        self._at = min(at, len(data))
        if at > len(data) or len(found) < num:
            raise self._cut_short()
        return found

    def _skip_strings(self, num: int) -> list[str]:
        """Moves the read position behind the next `num` strings. Returns an empty list."""
        read_size = struct.Struct("<Q").unpack_from
        at = self._at
        try:
            for _ in range(num):
                at += _SIZE_BYTES + read_size(self._data, at)[0]
        except (struct.error, OverflowError, IndexError):  # The position is outside the file.
            raise self._cut_short() from None
        if at > len(self._data):
            raise self._cut_short()
        self._at = at
        return []

    def _count(self, what: str, num_max: int) -> int:
        if (count := self._uint64()) > num_max:
            raise ValueError(f"the file has {count} {what}; at most {num_max} are allowed")
        return count

    def _cut_short(self) -> ValueError:
        return ValueError(
            f"the file is cut short: it ends at byte {len(self._data)}, within its metadata"
        )

    def _uint32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _uint64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])


def _shown(name: str) -> str:
    return repr(name[:80])
