"""Converts a GGUF file to a Hugging Face folder without weights, and caches the folder.

The weights stay in the GGUF file; the folder records the path of that file. If there are several
copies of the file, the folder records the copy that was used last.

A process that converts a file holds a lock and writes to a temporary folder, which it renames when
the conversion is complete. A second process waits for the lock and finds the result. A process that
dies leaves no folder that looks complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.models.config.model import ModelConfig
from tandem.models.files import naming, writing
from tandem.models.gguf.split import parts_of, whole_name

if TYPE_CHECKING:
    import numpy as np

    from tandem.models.gguf.layout import StoredTensor
    from tandem.models.gguf.metadata import GgufMetadata

CACHE_DIR_VARIABLE = "TANDEM_CACHE_DIR"
# Each converted folder has a file of this name, which records the path of the GGUF file.
CONVERSION_FILE = "tandem_conversion.json"

# Part of the cache key. It must be incremented with every change to the output of a conversion.
_VERSION = 8
_KEY_BYTES = 1 << 20
_QUANTIZATION = re.compile(r"[.-](I?Q\d\w*|T?Q\d\w*|MXFP4\w*|BF16|F16|F32|FP16|FP32)$", re.I)


def converted_folder(gguf_file: Path, *, cache_dir: Path | None = None) -> Path:
    """Returns the Hugging Face folder of a GGUF model. If the folder is not cached, the model is
    converted, which takes seconds.

    `gguf_file` may be any file of a split model. `cache_dir` defaults to `cache_root()`. Raises
    UnsupportedModel if the model cannot be converted, ConfigError if the file is not a valid GGUF
    file.
    """
    files = parts_of(gguf_file)
    return keep_conversion(
        _place(files, cache_dir), files[0], lambda folder: _convert(files, folder)
    )


def keep_conversion(place: Path, source: Path, convert: Callable[[Path], None]) -> Path:
    """Returns the cache folder `place`. If the folder does not exist, `convert` is called with a
    new folder to fill. `source` is the path of the file to convert; the folder records this path.
    If the folder exists and records the path of another copy of the file, the recorded path is
    changed to `source`. Raises ConfigError if the cache cannot be written."""
    if place.is_dir() and _source(place) == str(source.resolve()):
        return place
    with writing(place.parents[1], CACHE_DIR_VARIABLE):
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(place.name + ".lock").open("w") as lock:
            # If this process dies, the operating system releases the lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.is_dir():
                _set_source(place, source)
            else:
                unfinished = place.with_name(place.name + ".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    convert(unfinished)
                    unfinished.rename(place)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    return place


def cache_root() -> Path:
    """Returns the folder of converted and downloaded models: $TANDEM_CACHE_DIR,
    $XDG_CACHE_HOME/tandem or ~/.cache/tandem."""
    if named := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def model_name(gguf_file: Path) -> str:
    """Returns the file's name without its quantization: SmolLM2-135M-Instruct.Q4_1.gguf becomes
    SmolLM2-135M-Instruct."""
    return _QUANTIZATION.sub("", whole_name(gguf_file))


def gguf_config(gguf_file: Path) -> ModelConfig:
    """Reads the model's config from the metadata of a GGUF file, without a conversion.

    Raises UnsupportedModel if the model cannot be run, ConfigError if the file is not a valid GGUF
    file.
    """
    files = parts_of(gguf_file)
    with naming(files[0]):
        _, _, config, generation = _read(files)
        return ModelConfig.from_hf(config, generation)


def _place(files: Sequence[Path], cache_dir: Path | None) -> Path:
    # The key is a hash of the size, the first bytes and the last bytes, so all copies of a file
    # share one conversion. Different files of equal size differ in the first bytes (metadata) or in
    # the last bytes (weights).
    digest = hashlib.blake2b(str(_VERSION).encode(), digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f" {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_KEY_BYTES))
            stream.seek(max(0, size - _KEY_BYTES))
            digest.update(stream.read(_KEY_BYTES))
    return (cache_dir or cache_root()) / "models" / f"{model_name(files[0])}-{digest.hexdigest()}"


def _source(folder: Path) -> str:
    return str(json.loads((folder / CONVERSION_FILE).read_text())["source"])


def _set_source(folder: Path, source: Path) -> None:
    """Records `source` in a converted folder as the file with the weights. The file whose path was
    recorded before may have been deleted."""
    conversion = json.loads((folder / CONVERSION_FILE).read_text())
    changed = folder / f"{CONVERSION_FILE}.changed"
    write_json(changed, conversion | {"source": str(source.resolve())})
    changed.rename(folder / CONVERSION_FILE)


def _read(
    files: Sequence[Path],
) -> tuple[list[StoredTensor], GgufMetadata, dict[str, Any], dict[str, Any]]:
    """Returns the tensors, the metadata, config.json and generation_config.json."""
    # Imported here because the imports are slow and a cached folder does not need them.
    from tandem.models.gguf.config import generation_config, hf_config
    from tandem.models.gguf.layout import read_parts
    from tandem.models.gguf.metadata import GgufMetadata

    layout = read_parts(files)
    metadata = GgufMetadata(layout.keys)
    config = hf_config(
        metadata,
        tensor_names=frozenset(tensor.name for tensor in layout.tensors),
        rope_tables=_rope_tables(layout.tensors),
    )
    return layout.tensors, metadata, config, generation_config(metadata)


def _rope_tables(tensors: list[StoredTensor]) -> dict[str, np.ndarray]:
    """Returns the tables of RoPE frequency divisors by name, each float32 [rotary dim / 2]."""
    import gguf
    import numpy as np

    from tandem.models.gguf.names import ROPE_TABLES

    tables = {}
    for each in tensors:
        if each.name in ROPE_TABLES:
            data = np.fromfile(each.file, np.uint8, each.end - each.begin, offset=each.begin)
            tables[each.name] = np.asarray(gguf.dequantize(data, each.type), np.float32)
    return tables


def _convert(files: Sequence[Path], folder: Path) -> None:
    from tandem.models.gguf.names import ROPE_TABLES, hf_name, unused_layers
    from tandem.models.gguf.tokenizer import write_tokenizer

    with naming(files[0]):
        stored, metadata, config, generation = _read(files)
        # This call raises UnsupportedModel if the model cannot be run.
        ModelConfig.from_hf(config, generation)
        unused = unused_layers(tensor.name for tensor in stored)
        tensors = [
            tensor
            for tensor in stored
            if tensor.name not in ROPE_TABLES and not tensor.name.startswith(unused)
        ]
        for tensor in tensors:
            # This call raises UnsupportedModel if the tensor is unknown.
            hf_name(tensor.name, config["architectures"][0])
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", generation)
        write_tokenizer(metadata, folder)
    conversion = {
        "name": model_name(files[0]),
        "source": str(files[0].resolve()),
        "num_weights": sum(math.prod(tensor.shape) for tensor in tensors),
        "version": _VERSION,
    }
    write_json(folder / CONVERSION_FILE, conversion)


def write_json(path: Path, value: object) -> None:
    """Writes `value` as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")
