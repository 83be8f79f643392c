"""Counts, lengths and shapes that a GGUF file claims and does not have."""

import struct
import time

import numpy as np
import pytest

from tandem.errors import ConfigError
from tandem.models.gguf.layout import read_layout

NORM = {"output_norm.weight": np.arange(64, dtype=np.float32)}
HUGE = (1 << 63) - 1
UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9
F32, Q4_0 = 0, 2


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, num_items: int, items: bytes = b"") -> bytes:
    return key(ARRAY, struct.pack("<IQ", kind, num_items) + items)


def tensor(*dims: int, kind: int = F32, start: int = 0, name: bytes = b"t") -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, start)


ALIGNMENT = b"general.alignment"
NESTED = struct.pack("<IQ", ARRAY, 1) * 1000
BROKEN = {
    "empty": (b"", "empty"),
    "another format": (b"PK\x03\x04" + bytes(100), "does not begin with the bytes GGUF"),
    "version 1": (header(version=1), "the file's GGUF version is 1"),
    "big-endian": (header(version=3 << 24), "the file is big-endian, but only little-endian"),
    "cut in the header": (b"GGUF\x03", "within its metadata"),
    "keys that it lacks": (header(num_keys=10), "within its metadata"),
    "countless keys": (header(num_keys=HUGE), "the file has 9223372036854775807 keys"),
    "countless tensors": (header(num_tensors=HUGE), "the file has 9223372036854775807 tensors"),
    "a long key": (header(num_keys=1) + struct.pack("<Q", HUGE), "within its metadata"),
    "a long string": (
        header(num_keys=1) + key(STRING, struct.pack("<Q", HUGE)),
        "within its metadata",
    ),
    "no UTF-8": (header(num_keys=1) + key(STRING, text(b"\xff")), "utf-8"),
    "an endless array": (header(num_keys=1) + array(UINT32, HUGE), "items of arrays"),
    "an array that it lacks": (header(num_keys=1) + array(UINT32, 1 << 20), "within its metadata"),
    "many arrays": (
        header(num_keys=2) + 2 * array(UINT8, 3 << 20, bytes(3 << 20)),
        "items of arrays",
    ),
    "nested arrays": (header(num_keys=1) + key(ARRAY, NESTED), "unknown type 9"),
    "a type that is none": (header(num_keys=1) + key(77, b""), "unknown type 77"),
    "alignment 0": (
        header(num_keys=1) + key(UINT32, bytes(4), ALIGNMENT),
        "general.alignment is 0",
    ),
    "alignment in text": (header(num_keys=1) + key(STRING, text(b"x"), ALIGNMENT), "uint32"),
    "no dimension": (header(num_tensors=1) + tensor(), "0 dimensions"),
    "many dimensions": (header(num_tensors=1) + tensor(*[1] * 5), "5 dimensions"),
    "a dimension of 0": (header(num_tensors=1) + tensor(0, 5), "invalid shape"),
    "half a block": (header(num_tensors=1) + tensor(33, kind=Q4_0), "invalid shape"),
    "an unknown quantization": (header(num_tensors=1) + tensor(1, kind=999), "unknown type 999"),
    "a product over 64 bits": (
        header(num_tensors=1) + tensor(1 << 32, 1 << 32),
        "but the file ends at byte",
    ),
    "data that it lacks": (header(num_tensors=1) + tensor(1 << 20), "but the file ends at byte"),
    "data at the end of the world": (
        header(num_tensors=1) + tensor(1, start=HUGE + 1),
        "but the file ends at byte",
    ),
    "data twice": (
        header(num_tensors=2) + tensor(8) + tensor(8, name=b"u") + bytes(128),
        "overlap",
    ),
    "data askew": (
        header(num_tensors=1) + tensor(8, start=4) + bytes(128),
        "does not begin at a multiple of 32 bytes",
    ),
}


@pytest.mark.parametrize("skips_strings", [False, True])
@pytest.mark.parametrize(("content", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_layout_is_named_at_once(tmp_path, content, says, skips_strings):
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    started = time.process_time()
    with pytest.raises(ConfigError) as raised:
        read_layout(file, skips_strings=skips_strings)
    assert time.process_time() - started < 5
    assert raised.value.message.startswith(f"{file} cannot be read as a GGUF file: ")
    assert says in raised.value.message
    assert len(raised.value.message.splitlines()) == 1


def test_whole_files_pass(tmp_path, tiny_gguf):
    tiny = tiny_gguf.write(tmp_path / "tiny.gguf", NORM)
    whole, skipped = read_layout(tiny), read_layout(tiny, skips_strings=True)
    assert skipped.tensors == whole.tensors
    assert skipped.keys["tokenizer.ggml.tokens"] == []
    assert len(whole.keys["tokenizer.ggml.tokens"]) > 0
    aligned = header(2, 1) + key(UINT32, struct.pack("<I", 64), ALIGNMENT)
    aligned += tensor(8) + tensor(32, kind=Q4_0, start=64, name=b"u")
    (tmp_path / "aligned.gguf").write_bytes(aligned.ljust(128, b"\0") + bytes(64 + 18))
    read_layout(tmp_path / "aligned.gguf")
    (tmp_path / "short.gguf").write_bytes(aligned.ljust(128, b"\0") + bytes(64 + 17))
    with pytest.raises(ConfigError):
        read_layout(tmp_path / "short.gguf")
