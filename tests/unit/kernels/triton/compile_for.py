"""Compiles every Triton kernel for a CUDA architecture; needs no device.

`python tests/unit/kernels/triton/compile_for.py 90` compiles the first config of each kernel. With
-s it leaves out forms that are like others. With -v it compiles every config that the tuner tries
for the architecture, and attention for more head sizes and groups.

It prints a line for each config: registers a thread and bytes spilled, as ptxas reports them, bytes
of shared memory, the instruction of matrix products, and "left out" if the tuner does not choose
the config on a card of the architecture. Its exit status is 1, and the last lines say why, if

- all compiled configs of a kernel spill registers or need more shared memory than the card has, or
- a product of 64 rows or more does not use the large products of the architecture, or
- the sampler has more barriers than it should.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from math import inf
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from tandem_kernels.triton import (
    activation,
    blocks,
    causal_conv,
    decode_attention,
    edits,
    expert_choice,
    gated_norm,
    grouped_linear,
    key_choice,
    latent_cache,
    latent_decode,
    latent_prefill,
    linear_attention,
    logprobs,
    lora,
    norm,
    packed_linear,
    prefill_attention,
    rope_cache,
    sampling,
)
from tandem_kernels.triton.tuning import TunedKernel

# Largest shared memory of a program, in bytes: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
SHARED_MAX = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# The instruction of products of 64 rows or more, where an architecture has one.
LARGE_PRODUCT = {90: "wgmma", 100: "tcgen05"}
# A program samples one row, so its barriers are not hidden by other work.
BARRIERS_MAX = {"_sample": 40}
# Warps of kernels that are launched with another number than Triton's default, 4.
NUM_WARPS = {
    "_add_rms_norm": norm.num_warps(4096),
    "_gated_norm": norm.num_warps(4096),
    "_sample": sampling.NUM_WARPS,
    "_measure": logprobs.NUM_WARPS,
    "_shrink": lora.NUM_WARPS,
    "_expand": lora.NUM_WARPS,
    "_choose_experts": expert_choice.NUM_WARPS,
    "_scan_rows": linear_attention.NUM_WARPS,
    "_prepare_chunks": linear_attention.NUM_WARPS,
    "_solve_chunks": linear_attention.NUM_WARPS,
    "_scan_chunks": linear_attention.NUM_WARPS,
    "_choose": key_choice.NUM_WARPS,
}

PAGED = {"queries": "*bf16", "kv": "*bf16", "block_tables": "*i32", "context_lens": "*i32"}
PAGED |= {"kv_scales": "*bf16", "units": "*i32", "seqs": "*i32"}
INT8, E4M3 = ({"kv": numbers, "kv_scales": "*fp16"} for numbers in ("*i8", "*u8"))
LLAMA3 = {"GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_SIZE": 16, "DEVICE": "card"}
LLAMA3 |= {"WINDOW": 0, "CAP": 0.0, "HAS_SINKS": False}
# All keys of a context, and those that an indexer chooses: 2,048 keys, or 16 blocks of 128.
ALL_KEYS = {"UNIT": 0, "TOP_K": 0}
CHOSEN_KEYS = {"UNIT": 1, "TOP_K": 2048}
CHOSEN_BLOCKS = {"UNIT": 128, "TOP_K": 16}
SCALARS = {"sinks": "*bf16", "scale": "fp32"}
GPT_OSS = LLAMA3 | {"WINDOW": 128, "GROUP_SIZE": 8, "HEAD_DIM": 64, "BLOCK_D": 64}
GPT_OSS |= {"HAS_SINKS": True}
MISTRAL = LLAMA3 | {"WINDOW": 4096}
GEMMA2 = MISTRAL | {"CAP": 72.0, "GROUP_SIZE": 2, "HEAD_DIM": 256, "BLOCK_D": 256}
# Products with quantized weights: types of the numbers, scales and mins, and constants.
WEIGHTS = {"HAS_ZEROS": False, "HAS_MINS": False, "HAS_BLOCKS": False, "HAS_BIAS": True}
WEIGHTS |= {"DEVICE": "card", "GROUP": 128, "ZERO": 0}
PLAIN = ("*bf16", "*bf16", "*bf16", WEIGHTS | {"FORM": "plain", "GROUP": 1 << 30})
# fp8 by the cards' instruction, and as bytes for cards before sm_89.
FP8 = ("*fp8e4nv", "*fp32", "*fp32", WEIGHTS | {"FORM": "e4m3"})
FP8_BYTES = ("*u8", *FP8[1:])
MXFP4 = ("*u8", "*u8", "*u8", WEIGHTS | {"FORM": "mxfp4", "GROUP": 32})
AWQ = ("*u8", "*fp16", "*fp16", WEIGHTS | {"FORM": "int4", "HAS_ZEROS": True})
Q4_1 = ("*u8", "*fp16", "*fp16", WEIGHTS | {"FORM": "int4", "GROUP": 32, "HAS_MINS": True})
Q4_K = ("*u8", "*u8", "*u8", Q4_1[3] | {"HAS_BLOCKS": True})
Q5_K = (*Q4_K[:3], Q4_K[3] | {"FORM": "int5"})
Q6_K = ("*u8", "*i8", "*i8", WEIGHTS | {"FORM": "int6", "GROUP": 16, "ZERO": 32})
Q6_K[3]["HAS_BLOCKS"] = True
Q8_0 = ("*i8", "*fp16", "*fp16", WEIGHTS | {"FORM": "int8", "GROUP": 32})


def packed(
    form: tuple[str, str, str, dict[str, Any]], rows: int, *, has_splits: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """A linear layer with quantized weights."""
    numbers, scales, mins, constants = form
    types = {"x": "*bf16", "bias": "*bf16", "out": "*fp32" if has_splits else "*bf16"}
    types |= {"numbers": numbers, "high": "*u8", "scales": scales, "zeros": "*u8", "mins": mins}
    types |= dict.fromkeys(("block_scales", "block_mins"), "*fp16")
    constants = constants | {"HAS_SPLITS": has_splits, "ROWS": rows}
    return packed_linear._packed_linear, types, constants


def grouped(
    form: tuple[str, str, str, dict[str, Any]], rows: int
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """A linear layer of experts."""
    _, types, constants = packed(form, rows)
    types |= {"slots": "*i32", "experts": "*i32"}
    constants = constants | {"NUM_EXPERTS": 8, "SLOTS_OF_ROW": 2}
    del constants["HAS_SPLITS"]
    return grouped_linear._grouped_linear, types, constants


LATENTS = {"absorbed": "*bf16", "turning": "*bf16", "kv": "*bf16", "scale": "fp32"}
LATENTS |= {"cosines": "*fp32", "sines": "*fp32"}
LATENTS |= dict.fromkeys(("block_tables", "context_lens", "units", "seqs"), "*i32")
DEEPSEEK = {"NUM_HEADS": 128, "RANK": 512, "BLOCK_RANK": 512, "ROPE": 64}
DEEPSEEK |= {"BLOCK_SIZE": 16}

# Sparse attention: DeepSeek V3.2 chooses keys, MiniMax M3 blocks of keys.
CHOICE = dict.fromkeys(("queries", "keys", "out", "pool", "query_norm", "key_norm"), "*bf16")
CHOICE |= dict.fromkeys(("scores", "shares", "cosines", "sines"), "*fp32")
CHOICE |= dict.fromkeys(("units", "block_tables", "seqs", "lens", "slots"), "*i32")
CHOICE |= {"key_bias": "*bf16", "query_eps": "fp32", "key_eps": "fp32"}
INDEXER = {"DIM": 128, "BLOCK_DIM": 128, "BLOCK_SIZE": 16}
OF_KEYS = INDEXER | {"NUM_HEADS": 64, "HEADS": 64, "KEYS": 64, "RANGE": 1024, "ROPE": 64}
OF_KEYS |= {"HAS_QUERY_NORM": False, "HAS_BIAS": True}
OF_BLOCKS = INDEXER | {"NUM_HEADS": 4, "HEADS": 16, "KEYS": 128, "RANGE": 8, "ROPE": 64}
OF_BLOCKS |= {"UNIT": 128, "NUM_LOCAL": 1, "HAS_QUERY_NORM": True, "HAS_BIAS": False}

# Layers with a state: Qwen3-Next and Granite 4.
SPANS = dict.fromkeys(("first_rows", "num_rows", "first_positions", "slots"), "*i32")
STATE = SPANS | dict.fromkeys(("out", "q", "k", "v", "a", "b", "scores", "inverses"), "*bf16")
STATE |= dict.fromkeys(("factors", "a_log", "dt_bias", "skip", "states"), "*fp32")
DELTA = {"DT_MIN": 0.0, "DT_MAX": 0.0, "KEY_DIM": 128, "KEYS": 128, "VALUE_DIM": 128}
DELTA |= {"COLUMNS": 32, "SHARED": 2, "NUM_HEADS": 32, "IS_DELTA": True, "CHUNK": 64}
DELTA |= {"RATE_MAX": 1.0}
MAMBA2 = DELTA | {"DT_MAX": inf, "VALUE_DIM": 64, "SHARED": 48, "NUM_HEADS": 48, "IS_DELTA": False}
# The convolution of Qwen3-Next, and that of LFM2.
CONVOLVED = {"NUM_CHANNELS": 8192, "FIRST_1": 2048, "FIRST_2": 4096, "NUM_TAPS": 4, "TAPS": 4}
CONVOLVED |= {"ROOM_0": 64, "ROOM_1": 64, "ROOM_2": 128, "CHANNELS": 128, "IS_GATED": False}
SHORT = {"NUM_CHANNELS": 2048, "FIRST_1": 2048, "FIRST_2": 2048, "NUM_TAPS": 3, "TAPS": 2}
SHORT |= {"ROOM_0": 2048, "ROOM_1": 1, "ROOM_2": 1, "CHANNELS": 128, "IS_GATED": True}

GATED_NORM = {"SIZE": 128, "COLUMNS": 128, "NUM_GROUPS": 32, "IS_GATE_FIRST": False}
GATED_NORM |= {"HAS_NORM": True, "FACTOR": 1.0}

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
        GEMMA2 | {"ROWS": 16} | ALL_KEYS,
    ),
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        GPT_OSS | {"ROWS": 16} | ALL_KEYS,
    ),
    *(
        (
            decode_attention._attend_split,
            PAGED | kv | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
            LLAMA3 | {"ROWS": 16} | ALL_KEYS,
        )
        for kv in (INT8, E4M3)
    ),
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        LLAMA3 | {"GROUP_SIZE": 16, "ROWS": 16} | CHOSEN_BLOCKS,
    ),
    (
        decode_attention._weigh_splits,
        {"partials": "*fp32", "log_sums": "*fp32", "out": "*bf16", "sinks": "*bf16"},
        {"HEAD_DIM": 128, "BLOCK_D": 128, "SPLITS": 64, "HAS_SINKS": True},
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
    *(
        (
            latent_decode._attend_latent_split,
            LATENTS | {"partials": "*fp32", "log_sums": "*fp32"},
            DEEPSEEK | {"BLOCK_ROPE": 64, "DEVICE": "card"} | keys,
        )
        for keys in (ALL_KEYS, CHOSEN_KEYS)
    ),
    (
        latent_prefill._attend_latent_chunks,
        LATENTS | {"query_starts": "*i32", "out": "*bf16"},
        DEEPSEEK | {"BLOCK_ROPE": 64, "DEVICE": "card"},
    ),
    (
        latent_cache._norm_and_store_latents,
        dict.fromkeys(("queries", "q_norm", "out", "kv", "pool", "norm"), "*bf16")
        | {"cosines": "*fp32", "sines": "*fp32", "slots": "*i32", "eps": "fp32"},
        {"Q_RANK": 1536, "BLOCK_Q_RANK": 2048, "RANK": 512, "BLOCK_RANK": 512}
        | {"ROPE": 64, "PAIRS": 32, "BLOCK_SIZE": 16},
    ),
    *(
        (
            latent_decode._project_splits,
            {"partials": "*fp32", "log_sums": "*fp32", "values": "*bf16", "out": "*bf16"},
            {"NUM_HEADS": 128, "RANK": 512, "NUM_VALUES": 128, "BLOCK_VALUES": 128}
            | {"SEQS": seqs, "SPLITS": 64 // seqs, "RANKS": 64},
        )
        for seqs in (1, 16)
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
        dict.fromkeys(("x", "delta", "delta_weight", "weight", "out"), "*bf16") | {"eps": "fp32"},
        {"HIDDEN": 4096, "COLUMNS": 4096, "HAS_DELTA": True, "HAS_DELTA_NORM": True}
        | {"DELTA_MULTIPLIER": 0.22, "HAS_NORM": True},
    ),
    (
        activation._gated_mul,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"INNER": 14336, "COLUMNS": 1024, "IS_SILU": True, "ALPHA": 0.0, "LIMIT": 0.0}
        | {"GATE_FACTOR": 1.0, "FACTOR": 1.0},
    ),
    (
        activation._gated_mul,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"INNER": 2048, "COLUMNS": 1024, "IS_SILU": False, "ALPHA": 1.702, "LIMIT": 7.0}
        | {"GATE_FACTOR": 0.5, "FACTOR": 0.5},
    ),
    (activation._relu_squared, {"x": "*bf16", "out": "*bf16"}, {"WIDTH": 14336, "COLUMNS": 1024}),
    packed(FP8, 16, has_splits=True),
    packed(FP8, 64),
    packed(FP8_BYTES, 16),
    packed(AWQ, 16),
    packed(Q4_K, 16),
    packed(Q6_K, 16),
    grouped(MXFP4, 16),
    grouped(MXFP4, 64),
    grouped(PLAIN, 64),
    (
        packed_linear._add_splits,
        {"sums": "*fp32", "bias": "*bf16", "out": "*bf16"},
        {"HAS_BIAS": True, "COLUMNS": 1024},
    ),
    (
        grouped_linear._tile_by_expert,
        {"experts": "*i64", "slots": "*i32", "tile_experts": "*i32"},
        {"NUM_EXPERTS": 128, "BINS": 256, "TILE_ROWS": 16, "SLOTS": 1024},
    ),
    (
        expert_choice._choose_experts,
        {"logits": "*fp32", "correction": "*fp32", "chosen": "*i32", "shares": "*fp32"}
        | {"scale": "fp32"},
        {"NUM_EXPERTS": 256, "BINS": 256, "TOP_K": 8, "CHOICES": 8, "NUM_GROUPS": 8}
        | {"TOP_GROUPS": 4, "IS_NORMALIZED": True, "HAS_SIGMOIDS": True, "HAS_CORRECTION": True},
    ),
    (
        grouped_linear._mix,
        {"parts": "*bf16", "shares": "*fp32", "shared": "*bf16", "out": "*bf16"},
        {"TOP_K": 4, "HAS_SHARED": True, "COLUMNS": 1024},
    ),
    (
        blocks._move_words,
        {"source": "*i32", "target": "*i32", "source_ids": "*i64", "target_ids": "*i64"},
        {"WORDS": 2048, "HAS_SOURCE_IDS": True, "HAS_TARGET_IDS": True},
    ),
    (
        sampling._sample,
        {
            "unedited": "*fp32",
            "logits": "*fp32",
            "numbers": "*i64",
            "tokens": "*i64",
            "listed_ids": "*i32",
        },
        {"TILE": 4096, "LEVELS_TILE": 512},
    ),
    *(
        (kernel, STATE, {name: constants[name] for name in constants if name in kernel.arg_names})
        for constants in (DELTA, MAMBA2)
        for kernel in (
            linear_attention._scan_rows,
            linear_attention._prepare_chunks,
            linear_attention._solve_chunks,
            linear_attention._scan_chunks,
        )
        if constants["IS_DELTA"] or kernel is not linear_attention._solve_chunks
    ),
    *(
        (
            causal_conv._convolve,
            SPANS | dict.fromkeys(("weight", "bias", "out", "x"), "*bf16") | {"states": "*fp32"},
            sizes | {"ROWS": rows, "IS_SINGLE": rows == 1, "HAS_BIAS": True, "HAS_SILU": has_silu},
        )
        for sizes, rows, has_silu in (
            (CONVOLVED, 16, True),
            (CONVOLVED, 1, True),
            (SHORT, 1, False),
        )
    ),
    (causal_conv._keep_last, SPANS | {"x": "*bf16", "states": "*fp32"}, CONVOLVED),
    *(
        (
            gated_norm._gated_norm,
            dict.fromkeys(("x", "gate", "weight", "out"), "*bf16") | {"eps": "fp32"},
            GATED_NORM | more,
        )
        for more in ({}, {"NUM_GROUPS": 1, "IS_GATE_FIRST": True, "SIZE": 4096, "COLUMNS": 4096})
    ),
    *(
        (kernel, CHOICE, {name: sizes[name] for name in sizes if name in kernel.arg_names})
        for sizes, kernel in (
            (OF_KEYS, key_choice._index_heads),
            (OF_BLOCKS, key_choice._index_heads),
            (OF_KEYS, key_choice._score_keys),
            (OF_BLOCKS, key_choice._score_blocks),
        )
    ),
    (
        key_choice._choose,
        CHOICE,
        {"TOP_K": 2048, "NUM_LISTS": 1, "UNIT": 1, "TILE": 2048},
    ),
    (edits._edit, {"logits": "*fp32", "numbers": "*i32"}, {"TILE": 256}),
    (edits._mask, {"logits": "*fp32", "words": "*i32"}, {"TILE": 4096}),
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
        LLAMA3 | {"ROWS": 16} | ALL_KEYS,
    ),
    (
        decode_attention._attend_split,
        PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
        MISTRAL | {"ROWS": 16} | ALL_KEYS,
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
    packed(AWQ, 32, has_splits=True),
    packed(FP8, 32),
    *(packed(form, 64) for form in (FP8_BYTES, AWQ, Q4_1, Q4_K, Q5_K, Q8_0)),
    *(packed(form, 128) for form in (FP8, FP8_BYTES, AWQ, Q4_K, Q6_K)),
    *(grouped(form, 128) for form in (PLAIN, FP8, MXFP4, AWQ)),
]


def attention_of(
    head_dim: int, group_size: int
) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Decode and prefill attention of a Llama with other heads."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    heads = LLAMA3 | {"GROUP_SIZE": group_size, "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    return [
        (
            decode_attention._attend_split,
            PAGED | {"partials": "*fp32", "log_sums": "*fp32"} | SCALARS,
            heads | {"ROWS": 16} | ALL_KEYS,
        ),
        (
            prefill_attention._attend_chunks,
            PAGED | {"query_starts": "*i32", "out": "*bf16"} | SCALARS,
            heads,
        ),
    ]


# Head sizes and groups of models, also those that are no power of 2.
MORE_HEADS = [
    form
    for head_dim in (64, 96, 128, 256)
    for group_size in (1, 4, 7, 16)
    if (head_dim, group_size) != (128, 4)  # in MORE_KERNELS
    for form in attention_of(head_dim, group_size)
] + attention_of(80, 7)


@dataclass(frozen=True)
class Compiled:
    """A config of a kernel, compiled for an architecture."""

    kernel: str
    config: triton.Config
    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a program
    product: str  # instruction of matrix products: wgmma, tcgen05, mma or nothing
    rows: int  # rows of a tile of the product; 0 if the kernel has none
    barriers: int  # places in the code at which the threads of a program wait for each other

    def is_left_out(self, arch: int) -> bool:
        """Returns whether the tuner does not choose this config."""
        return self.spilled > 0 or self.shared > SHARED_MAX[arch]

    def line(self, arch: int) -> str:
        size = f"{self.registers:4} registers{self.spilled:5} spilled{self.shared:7} shared"
        end = "  left out" if self.is_left_out(arch) else ""
        return f"{self.kernel:26}{size} {self.product:8}{self.config}{end}"


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, *, first_only: bool
) -> list[Compiled]:
    """Compiles the configs that the tuner tries for these constants, or the first one of them."""
    function = kernel.fn if isinstance(kernel, TunedKernel) else kernel
    name = function.__name__
    configs = [triton.Config({}, num_warps=NUM_WARPS.get(name, 4))]
    if isinstance(kernel, TunedKernel):
        configs = kernel.fitting(constants, arch)
    return [
        _compile(function, types, constants, config, arch)
        for config in (configs[:1] if first_only else configs)
    ]


def _compile(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    config: triton.Config,
    arch: int,
) -> Compiled:
    target = GPUTarget("cuda", arch, 32)
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
        if (signature[name].startswith("*") or name.startswith(("stride", "num_in", "per_split")))
        and not function.params[i].do_not_specialize
        and not function.params[i].do_not_specialize_on_alignment
    }
    source = ASTSource(function, signature, constexprs, attrs)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    bind(function, target)
    report = io.StringIO()
    knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(report):
        compiled = triton.compile(source, target=target, options=options)
    registers, spilled = (
        int(re.search(pattern, report.getvalue())[1])
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    ptx = compiled.asm["ptx"]
    products = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    product = next((name for name, text in products.items() if text in ptx), "")
    rows = constexprs.get("ROWS", 0) if product else 0
    shared = compiled.metadata.shared
    barriers = ptx.count("bar.sync")
    return Compiled(function.__name__, config, registers, spilled, shared, product, rows, barriers)


def faults(compiled: list[Compiled], arch: int) -> list[str]:
    """Returns what is wrong with the configs of a kernel, for an architecture."""
    found = []
    if all(each.is_left_out(arch) for each in compiled):
        found.append(f"no config is left: {compiled[0].line(arch)}")
    wanted = LARGE_PRODUCT.get(arch)
    found += [
        f"{wanted} is not used: {each.line(arch)}"
        for each in compiled
        if wanted and each.rows >= 64 and each.product != wanted and not each.is_left_out(arch)
    ]
    found += [
        f"{each.barriers} barriers are more than {BARRIERS_MAX[each.kernel]}: {each.line(arch)}"
        for each in compiled
        if each.barriers > BARRIERS_MAX.get(each.kernel, each.barriers)
    ]
    return found


def bind(function: Any, target: GPUTarget) -> None:
    """Has Triton take arguments as a launch does: in a function that it writes, whose own names an
    argument must not have."""
    binder = create_function_from_signature(
        function.signature, function.params, CUDABackend(target)
    )
    bound, *_ = binder(**dict.fromkeys(function.arg_names, 16))
    assert set(bound.values()) == {16}, bound


def main() -> None:
    arch = int(sys.argv[1])
    is_long = "-v" in sys.argv
    kernels = KERNELS if "-s" in sys.argv else KERNELS + MORE_KERNELS
    kernels = kernels + MORE_HEADS if is_long else kernels
    # Cards before sm_89 have no instruction for numbers of fp8.
    kernels = [k for k in kernels if arch >= 89 or "*fp8e4nv" not in k[1].values()]
    wrong = []
    for kernel, types, constants in kernels:
        compiled = compile_kernel(kernel, types, constants, arch, first_only=not is_long)
        for each in compiled:
            print(each.line(arch), flush=True)
        wrong += faults(compiled, arch)
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
