"""The built-in model's weights as a GGUF file of another type: `quantized("Q4_0")`.

The output matrix stays Q8_0, as in the built-in file, and so do norms stay float32.
"""

from __future__ import annotations

from pathlib import Path

import gguf

from tandem.models.source import built_in_file

FOLDER = Path.home() / ".cache" / "tandem" / "peers" / "gguf"


def quantized(name: str) -> str:
    """Returns the path of the file, which is written once."""
    source = built_in_file()
    assert source is not None, "the built-in model is not installed"
    path = FOLDER / f"{source.stem.split('.')[0]}.{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        _write(source, unfinished, gguf.GGMLQuantizationType[name])
        unfinished.rename(path)
    return str(path)


def _write(source: Path, path: Path, wanted: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.Q4_1 and kind != wanted:
            data, kind = gguf.quantize(gguf.dequantize(data, kind), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
