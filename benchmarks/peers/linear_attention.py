"""Linear attention beside llama.cpp: random weights of Qwen3.5-0.8B's shape, in one GGUF file each.

    benchmarks/peers/install_llama_cpp.sh       (once)
    python -m benchmarks.peers.linear_attention [--threads 2] [--repeats 5] [--types Q8_0,Q4_K,BF16]

Both engines read the same file and take turns, as in engines.py. The figures are tokens a second;
the goal is 1.2 times llama.cpp's.

Writes benchmarks/results/linear_attention_peers.json and prints the tables of docs/measurements.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers import engines
from benchmarks.peers.engines import LOCAL, PYTHONS, chosen_of, measure, tables, works_of
from benchmarks.peers.quantized_files import FOLDER, num_bytes, scaled_blocks
from tandem.models.source import built_in_file
from tandem_bench.framework import RESULTS, Report, numbers, options, run_main

TYPES = ("Q8_0", "Q4_K", "BF16")
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 24, 1024, 3584, 8, 2, 256
LINEAR_HEADS, LINEAR_DIM, TAPS, INTERVAL = 16, 128, 4, 4
VOCABULARY = 248320
_LINEAR = LINEAR_HEADS * LINEAR_DIM
_SIZE = 4.0  # of random weights: so much larger than usual that no float16 scale is denormal
_UNUSED = 5  # a token's type
_ARCHITECTURE = "qwen35"
_SIZES: dict[str, int | float | list[int]] = {
    "context_length": 32768,
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e7,
    "rope.dimension_count": HEAD_DIM // 4,
    "rope.dimension_sections": [11, 11, 10, 0],
    "full_attention_interval": INTERVAL,
    "ssm.conv_kernel": TAPS,
    "ssm.state_size": LINEAR_DIM,
    "ssm.group_count": LINEAR_HEADS,
    "ssm.time_step_rank": LINEAR_HEADS,
    "ssm.inner_size": _LINEAR,
}
_MLP = {
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
_ATTENTION = {  # outputs and inputs; q has the gates, too
    "attn_q": (2 * HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
}
_DELTA = {
    "attn_qkv": (3 * _LINEAR, HIDDEN),
    "attn_gate": (_LINEAR, HIDDEN),
    "ssm_alpha": (LINEAR_HEADS, HIDDEN),
    "ssm_beta": (LINEAR_HEADS, HIDDEN),
    "ssm_out": (HIDDEN, _LINEAR),
}


def random_model(name: str) -> str:
    """Returns the path of the random model, all of whose matrices are of one type. The file is
    written once."""
    path = FOLDER / f"random-qwen35-0.8b.{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        _write(unfinished, gguf.GGMLQuantizationType[name])
        unfinished.rename(path)
    return str(path)


def _write(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    for key, value in _SIZES.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{_ARCHITECTURE}.{key}", value)
    _add_tokenizer(writer)
    chance = np.random.default_rng(0)

    def add_matrix(tensor: str, shape: tuple[int, int]) -> None:
        if kind == gguf.GGMLQuantizationType.BF16:
            data = _random_bf16(shape, chance)
        else:
            data = scaled_blocks(kind, shape, chance, size=_SIZE)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=kind)

    def add_floats(tensor: str, *shape: int, value: float = 1.0) -> None:
        writer.add_tensor(tensor, np.full(shape, value, np.float32))

    add_matrix("token_embd", (VOCABULARY, HIDDEN))
    add_floats("output_norm.weight", HIDDEN)
    for number in range(LAYERS):
        layer = f"blk.{number}"
        add_floats(f"{layer}.attn_norm.weight", HIDDEN)
        add_floats(f"{layer}.post_attention_norm.weight", HIDDEN)
        is_linear = (number + 1) % INTERVAL != 0
        for part, shape in (_MLP | (_DELTA if is_linear else _ATTENTION)).items():
            add_matrix(f"{layer}.{part}", shape)
        if not is_linear:
            add_floats(f"{layer}.attn_q_norm.weight", HEAD_DIM)
            add_floats(f"{layer}.attn_k_norm.weight", HEAD_DIM)
            continue
        add_floats(f"{layer}.ssm_a", LINEAR_HEADS, value=-0.1)
        add_floats(f"{layer}.ssm_dt.bias", LINEAR_HEADS, value=-2.0)
        add_floats(f"{layer}.ssm_conv1d.weight", 3 * _LINEAR, TAPS, value=0.25)
        add_floats(f"{layer}.ssm_norm.weight", LINEAR_DIM)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_bf16(shape: tuple[int, int], chance: np.random.Generator) -> np.ndarray:
    """Returns the bytes of weights of about 1 / sqrt(inputs), with random signs and mantissas."""
    exponent = 127 - round(np.log2(shape[1]) / 2)
    bits = chance.integers(0, 1 << 16, shape, np.uint16)
    bits &= 0x807F
    bits |= exponent << 7
    return bits.view(np.uint8)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds the built-in model's tokenizer, with unused tokens up to the size of the vocabulary."""
    source = built_in_file()
    assert source is not None, "the built-in model is not installed"
    fields = gguf.GGUFReader(source).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, (kind, *inner) = field.contents(), field.types
        if name == "tokenizer.ggml.tokens":
            value += [f"[PAD{number}]" for number in range(len(value), VOCABULARY)]
        if name == "tokenizer.ggml.token_type":
            value += [_UNUSED] * (VOCABULARY - len(value))
        writer.add_key_value(name, value, kind, inner[-1] if inner else None)


def command(engine: str, name: str, threads: int) -> list[str]:
    file, count = random_model(name), str(threads)
    if engine == "llama.cpp":
        return [str(PYTHONS[engine]), str(LOCAL / "engine_llama_cpp.py"), file, count]
    # "auto" would widen bf16 weights to fp32 on a processor without instructions for bf16.
    dtype = "bfloat16" if name == "BF16" else "auto"
    return [sys.executable, str(LOCAL / "engine_tandem.py"), file, dtype, count]


@options
class Options:
    threads: str = "2"
    repeats: int = 5
    types: str = ""
    """Types of the matrices. Default: all."""
    work: str = ""
    """Work, such as 'prefill 512,decode 1'. Default: prefill of 512 and 2,048 tokens, and decode
    of 1 and 8 sequences."""
    steps: int = engines.STEPS
    """Steps of decode in a turn."""
    output: Path = RESULTS / "linear_attention_peers.json"


def main(options: Options = Options()) -> None:
    if not PYTHONS["llama.cpp"].exists():
        sys.exit("llama.cpp is not installed: run benchmarks/peers/install_llama_cpp.sh")
    report = Report(options.output)
    works = [work for work in works_of(options.steps) if not work.startswith("decode 32")]
    names = chosen_of("--work", options.work, list(map(engines.label, works)))
    works = [work for work in works if engines.label(work) in names]
    rows: list[dict[str, Any]] = []
    for threads in numbers(options.threads):
        # One type at a time, so that two engines fit in the memory beside others.
        for name in chosen_of("--types", options.types, list(TYPES)):
            both = {
                f"{engine} random {name}": command(engine, name, threads)
                for engine in ("tandem", "llama.cpp")
            }
            # The embedding is the output matrix, so a step reads all matrices.
            read = num_bytes(random_model(name))
            weight_bytes = dict.fromkeys(both, read).__getitem__
            rows += measure(both, threads, works, options.repeats, weight_bytes)
    load = os.getloadavg()[0]
    report.write(repeats=options.repeats, load=load, rows=rows)
    print(f"load {load:.1f}\n\n{tables(rows)}")


if __name__ == "__main__":
    run_main(main)
