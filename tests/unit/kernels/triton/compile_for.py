"""Compiles every Triton kernel for a CUDA architecture; needs no device.

`python tests/unit/kernels/triton/compile_for.py 90` writes a line for the first config of each
kernel, with -v for all: registers a thread, bytes spilled, shared memory, as ptxas reports them.
With -s it leaves out forms that are like others.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import create_function_from_signature

from tandem_kernels.triton import (
    activation,
    blocks,
    decode_attention,
    edits,
    grouped_linear,
    latent_cache,
    latent_decode,
    latent_prefill,
    logprobs,
    lora,
    norm,
    packed_linear,
    prefill_attention,
    rope_cache,
    sampling,
)

PAGED = {"queries": "*bf16", "kv": "*bf16", "block_tables": "*i32", "context_lens": "*i32"}
PAGED |= {"kv_scales": "*bf16"}
INT8, E4M3 = ({"kv": numbers, "kv_scales": "*fp16"} for numbers in ("*i8", "*u8"))
LLAMA3 = {"GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_SIZE": 16, "DEVICE": "card"}
LLAMA3 |= {"WINDOW": 0, "CAP": 0.0, "HAS_SINKS": False}
SCALARS = {"sinks": "*bf16", "scale": "fp32"}
GPT_OSS = LLAMA3 | {"WINDOW": 128, "GROUP_SIZE": 8, "HEAD_DIM": 64, "BLOCK_D": 64}
GPT_OSS |= {"HAS_SINKS": True}
MISTRAL = LLAMA3 | {"WINDOW": 4096}
GEMMA2 = MISTRAL | {"CAP": 72.0, "GROUP_SIZE": 2, "HEAD_DIM": 256, "BLOCK_D": 256}
QWEN = LLAMA3 | {"GROUP_SIZE": 7, "HEAD_DIM": 80}
MIXTRAL = {"NUM_OUT": 28672, "NUM_IN": 4096, "NUM_EXPERTS": 8, "SLOTS_OF_ROW": 2}
MIXTRAL |= {"COLUMNS": 64, "INPUTS": 64}

PACKED = {"NUM_OUT": 28672, "NUM_IN": 4096, "HAS_BIAS": True}
AWQ = {"NUM_GROUPS": 32, "HAS_NIBBLES": True, "HAS_ZEROS": True, "HAS_MINS": False, "INPUTS": 64}
Q4_1 = AWQ | {"NUM_GROUPS": 128, "HAS_ZEROS": False, "HAS_MINS": True, "INPUTS": 32}
Q8_0 = Q4_1 | {"HAS_NIBBLES": False, "HAS_MINS": False}
DECODE, PREFILL = {"ROWS": 16, "COLUMNS": 32}, {"ROWS": 64, "COLUMNS": 64}

LATENTS = {"absorbed": "*bf16", "rotated": "*bf16", "kv": "*bf16", "scale": "fp32"}
LATENTS |= {"block_tables": "*i32", "context_lens": "*i32"}
DEEPSEEK = {"NUM_HEADS": 128, "RANK": 512, "BLOCK_RANK": 512, "ROPE": 64}
DEEPSEEK |= {"BLOCK_SIZE": 16}

HEADS = {
    "NUM_HEADS": 32,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "PAIRS": 64,
    "BLOCK_SIZE": 16,
    "HEADS": 8,
}

# kernel, types of its pointers, constants; what is named neither way is an i32
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        GEMMA2 | {"ROWS": 16},
    ),
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        GPT_OSS | {"ROWS": 16},
    ),
    *(
        (
            decode_attention._attend_split,
            PAGED | kv | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
            LLAMA3 | {"ROWS": 16},
        )
        for kv in (INT8, E4M3)
    ),
    (
        decode_attention._weigh_splits,
        {"partials": "*fp32", "log_sums": "*fp32", "out": "*bf16", "sinks": "*bf16"},
        {"HEAD_DIM": 128, "BLOCK_D": 128, "SPLITS": 16, "HAS_SINKS": True},
    ),
    (
        prefill_attention._attend_chunks,
        PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
        GEMMA2,
    ),
    (
        prefill_attention._attend_chunks,
        PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
        GPT_OSS,
    ),
    *(
        (
            prefill_attention._attend_chunks,
            PAGED | kv | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
            LLAMA3,
        )
        for kv in (INT8, E4M3)
    ),
    *(
        (
            rope_cache._rotate_and_store,
            dict.fromkeys(("qkv", "queries", "kv", "kv_scales", "q_norm", "k_norm"), "*bf16")
            | kv
            | {"fixed_scales": "*fp16"}
            | {"cosines": "*fp32", "sines": "*fp32", "slots": "*i64", "eps": "fp32"},
            HEADS | {"HAS_NORM": True, "HAS_FIXED": kv is E4M3},
        )
        for kv in ({}, INT8, E4M3)
    ),
    (
        latent_decode._attend_latent_split,
        LATENTS | {"partials": "*fp32", "log_sums": "*fp32"},
        DEEPSEEK | {"BLOCK_ROPE": 64, "DEVICE": "card"},
    ),
    (
        latent_prefill._attend_latent_chunks,
        LATENTS | {"query_starts": "*i32", "out": "*bf16"},
        DEEPSEEK | {"BLOCK_ROPE": 64, "DEVICE": "card"},
    ),
    (
        latent_cache._rotate_and_store_latents,
        dict.fromkeys(("queries", "kv", "rotated", "pool", "norm"), "*bf16")
        | {"cosines": "*fp32", "sines": "*fp32", "slots": "*i32", "eps": "fp32"},
        DEEPSEEK | {"Q_DIM": 192, "PAIRS": 32, "HEADS": 16},
    ),
    (
        lora._shrink,
        {"x": "*bf16", "middle": "*fp32", "parts": "*i64", "rows": "*i32", "adapters": "*i32"},
        {"ROWS": 16, "RANKS": 64, "INPUTS": 128},
    ),
    (
        lora._expand,
        {"out": "*bf16", "middle": "*fp32", "parts": "*i64", "rows": "*i32", "adapters": "*i32"},
        {"ROWS": 16, "RANKS": 64, "COLUMNS": 64},
    ),
    (
        norm._add_rms_norm,
        dict.fromkeys(("x", "delta", "weight", "out"), "*bf16") | {"eps": "fp32"},
        {"HIDDEN": 4096, "COLUMNS": 4096, "HAS_DELTA": True},
    ),
    (
        activation._gated_mul,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"INNER": 14336, "COLUMNS": 1024, "IS_SILU": True, "ALPHA": 0.0, "LIMIT": 0.0},
    ),
    (
        activation._gated_mul,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"INNER": 2048, "COLUMNS": 1024, "IS_SILU": False, "ALPHA": 1.702, "LIMIT": 7.0},
    ),
    (
        grouped_linear._grouped_linear,
        dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
        | {"slots": "*i32", "experts": "*i32"},
        MIXTRAL | {"ROWS": 16, "HAS_BIAS": True},
    ),
    *(
        (
            packed_linear._packed_linear,
            dict.fromkeys(("x", "bias", "out"), "*bf16")
            | {"numbers": "*u8" if form["HAS_NIBBLES"] else "*i8", "zeros": "*u8"}
            | dict.fromkeys(("scales", "mins"), "*fp16"),
            PACKED | form | size,
        )
        for form, size in ((AWQ, DECODE), (Q4_1, DECODE), (Q8_0, PREFILL))
    ),
    (
        blocks._move_words,
        {"source": "*i32", "target": "*i32", "source_ids": "*i64", "target_ids": "*i64"},
        {"WORDS": 2048, "HAS_SOURCE_IDS": True, "HAS_TARGET_IDS": True},
    ),
    (
        sampling._sample,
        {"logits": "*fp32", "numbers": "*i64", "tokens": "*i64"}
        | {"listed_ids": "*i32", "listed_keys": "*i32"},
        {"TILE": 4096, "LEVELS_TILE": 1024},
    ),
    (edits._edit, {"logits": "*fp32", "numbers": "*i32"}, {"TILE": 256}),
    (
        logprobs._measure,
        dict.fromkeys(("logits", "largest", "sums", "chosen"), "*fp32")
        | {"wanted": "*i32", "above": "*i32", "top": "*i64"},
        {"TILE": 4096},
    ),
]

# Other sizes, and forms of which those above have each branch.
MORE_KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        LLAMA3 | {"ROWS": 16},
    ),
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        MISTRAL | {"ROWS": 16},
    ),
    (
        prefill_attention._attend_chunks,
        PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
        LLAMA3,
    ),
    (
        prefill_attention._attend_chunks,
        PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
        MISTRAL,
    ),
    (
        grouped_linear._grouped_linear,
        dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
        | {"slots": "*i32", "experts": "*i32"},
        MIXTRAL | {"ROWS": 64, "HAS_BIAS": False},
    ),
    (
        packed_linear._packed_linear,
        dict.fromkeys(("x", "bias", "out"), "*bf16")
        | {"numbers": "*u8", "zeros": "*u8"}
        | dict.fromkeys(("scales", "mins"), "*fp16"),
        PACKED | AWQ | PREFILL,
    ),
]
# Groups and heads that are no power of 2.
ODD_KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        QWEN | {"ROWS": 16},
    ),
    (
        prefill_attention._attend_chunks,
        PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
        QWEN,
    ),
]


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget
) -> list[tuple[str, Any]]:
    """Returns (config, compiled kernel) of each config that the kernel is tuned over."""
    configs, function = [triton.Config({}, num_warps=8)], kernel
    if isinstance(kernel, Autotuner):
        configs, function = kernel.early_config_prune(kernel.configs, {}, **constants), kernel.fn
    compiled = []
    for config in configs if "-v" in sys.argv else configs[:1]:
        constexprs = constants | config.kwargs
        names = function.arg_names
        signature = {
            name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names
        }
        # As at run time for tensors' addresses and for strides.
        aligned = [["tt.divisibility", 16]]
        attrs = {
            (i,): aligned
            for i, name in enumerate(names)
            if (signature[name].startswith("*") or name.startswith("stride"))
            and not function.params[i].do_not_specialize
            and not function.params[i].do_not_specialize_on_alignment
        }
        source = ASTSource(function, signature, constexprs, attrs)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        bind(function, target)
        compiled.append((str(config), triton.compile(source, target=target, options=options)))
    return compiled


def bind(function: Any, target: GPUTarget) -> None:
    """Has Triton take arguments as a launch does: in a function that it writes, whose own names an
    argument must not have."""
    binder = create_function_from_signature(
        function.signature, function.params, CUDABackend(target)
    )
    bound, *_ = binder(**dict.fromkeys(function.arg_names, 16))
    assert set(bound.values()) == {16}, bound


def resources(compiled: Any, arch: int) -> tuple[int, int, int]:
    """Registers a thread, bytes spilled, bytes of shared memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    suffix = "a" if arch >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        done = subprocess.run(
            [get_ptxas(arch).path, "-v", f"-arch=sm_{arch}{suffix}", ptx.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", done.stderr)[1])
    return registers, spilled, compiled.metadata.shared


def main() -> None:
    arch = int(sys.argv[1])
    target = GPUTarget("cuda", arch, 32)
    kernels = KERNELS if "-s" in sys.argv else KERNELS + MORE_KERNELS
    kernels = kernels + ODD_KERNELS if "-v" in sys.argv else kernels
    for kernel, types, constants in kernels:
        lines = []
        for config, compiled in compile_kernel(kernel, types, constants, target):
            registers, spilled, shared = resources(compiled, arch)
            lines.append((spilled, registers, shared, config))
        for spilled, registers, shared, config in lines:
            name = kernel.fn.__name__
            print(f"{name:20}{registers:4} registers{spilled:5} spilled{shared:7} shared {config}")


if __name__ == "__main__":
    main()
