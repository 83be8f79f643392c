"""GGUF files to measure: the built-in model's weights in another type, or a random model.

The output matrix of `quantized("Q4_0")` stays Q8_0, as in the built-in file, and so do norms stay
float32; that of `quantized("F16")` is dense, too. K-types need rows of a multiple of 256 weights,
which the built-in model does not have: `random_model("Q4_K")` has them, with a hidden size of
1,024.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tandem.models.source import built_in_file

FOLDER = Path.home() / ".cache" / "tandem" / "peers" / "gguf"
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 12, 1024, 2816, 16, 4, 64
VOCABULARY = 49152  # the built-in model's, whose tokenizer the random one has
_SIZE = 64.0  # of random weights: so much larger than usual that no float16 scale is denormal
# Bytes of a block where its float16 scales are, and their sizes for weights of about 1.
_SCALES = {
    "Q8_0": {0: 1 / 74},
    "Q4_K": {0: 0.7 / 31 / 4.6, 2: 0.7 * 7.5 / 31 / 4.6},
    "Q5_K": {0: 0.7 / 31 / 9.2, 2: 0.7 * 15.5 / 31 / 9.2},
    "Q6_K": {208: 1 / 74 / 18},
}
_SIZES = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": HEAD_DIM,
}
_LAYER = {  # outputs and inputs
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def quantized(name: str) -> str:
    """Returns the path of the built-in model in a type, which is written once."""
    wanted = gguf.GGMLQuantizationType[name]
    source = _built_in()

    def add_tensors(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
        for tensor in reader.tensors:
            data, kind = tensor.data, tensor.tensor_type
            is_dense = wanted == gguf.GGMLQuantizationType.F16 and len(tensor.shape) > 1
            if kind != wanted and (is_dense or kind == gguf.GGMLQuantizationType.Q4_1):
                data, kind = gguf.quantize(gguf.dequantize(data, kind), wanted), wanted
            writer.add_tensor(tensor.name, data, raw_dtype=kind)

    return written(f"{source.stem.split('.')[0]}.{name}.gguf", {}, add_tensors)


def random_model(name: str) -> str:
    """Returns the path of the random model, all of whose matrices are of one type."""

    def add_matrix(writer: gguf.GGUFWriter, tensor: str, shape: tuple[int, int]) -> None:
        kind = gguf.GGMLQuantizationType[name]
        rng = np.random.default_rng(len(writer.tensors[-1]))
        blocks = scaled_blocks(kind, shape, rng, size=_SIZE)
        writer.add_tensor(f"{tensor}.weight", blocks, raw_dtype=kind)

    def add_tensors(_: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
        add_matrix(writer, "token_embd", (VOCABULARY, HIDDEN))
        norms = ["output_norm"]
        for layer in range(LAYERS):
            norms += [f"blk.{layer}.{norm}" for norm in ("attn_norm", "ffn_norm")]
            for part, shape in _LAYER.items():
                add_matrix(writer, f"blk.{layer}.{part}", shape)
        for norm in norms:
            writer.add_tensor(f"{norm}.weight", np.ones(HIDDEN, np.float32))

    return written(f"random-{HIDDEN}.{name}.gguf", _SIZES, add_tensors)


def scaled_blocks(
    kind: gguf.GGMLQuantizationType,
    shape: tuple[int, int],
    chance: np.random.Generator,
    *,
    size: float,
) -> np.ndarray:
    """Returns weights of about size / sqrt(inputs), in blocks of otherwise random bits."""
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_out, num_in = shape
    blocks = chance.integers(0, 256, (num_out * num_in // block_inputs, block_bytes), np.uint8)
    for at, scale in _SCALES[kind.name].items():
        sizes = size * scale / num_in**0.5 * chance.uniform(0.7, 1.3, (len(blocks), 1))
        blocks[:, at : at + 2] = sizes.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_out, -1)


def num_bytes(file: str, of_number: int | None = None) -> int:
    """Returns the bytes of a file's matrices, as they are or with so many for each number."""
    tensors = [each for each in gguf.GGUFReader(file).tensors if len(each.shape) > 1]
    if of_number is None:
        return sum(int(each.n_bytes) for each in tensors)
    return sum(int(each.n_elements) * of_number for each in tensors)


def _built_in() -> Path:
    source = built_in_file()
    assert source is not None, "the built-in model is not installed"
    return source


def written(
    name: str,
    sizes: dict[str, int],
    add_tensors: Callable[[gguf.GGUFReader, gguf.GGUFWriter], None],
) -> str:
    """Writes a file with the built-in model's metadata, but for its sizes, unless it is there."""
    path = FOLDER / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        reader = gguf.GGUFReader(_built_in())
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(unfinished, architecture)
        for field in reader.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind, *inner = field.types
            value = sizes.get(field.name.removeprefix(f"{architecture}."), field.contents())
            writer.add_key_value(field.name, value, kind, inner[-1] if inner else None)
        add_tensors(reader, writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(path)
    return str(path)
