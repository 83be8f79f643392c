"""The parts that are compiled at install; everything else is in pyproject.toml.

Optional: where there is no compiler, plain Python and torch do the same, more slowly, and say so.
"""

from setuptools import Extension, setup

NATIVE = "kernels/tandem_kernels/native"
INSTRUCTIONS = ("amx", "avx512_bf16", "avx512", "avx2", "plain")

setup(
    ext_modules=[
        Extension(
            "tandem._block_hash",
            ["services/tandem/_block_hash.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        # One binary with all instruction sets; it chooses at run time.
        Extension(
            "tandem_kernels.native._decoder",
            [
                f"{NATIVE}/{name}.cpp"
                for name in ("api", "blocks", "pack", "pack_blocks", *INSTRUCTIONS)
            ],
            depends=[
                f"{NATIVE}/{name}.h"
                for name in (
                    "amx",
                    "attention",
                    "attention_dot",
                    "blocks",
                    "decoder",
                    "experts",
                    "forward",
                    "gated",
                    "inputs",
                    "kv_fp8",
                    "kv_int4",
                    "kv_int8",
                    "kv_part",
                    "latent",
                    "limits",
                    "linear",
                    "linear_amx",
                    "linear_avx512_bf16",
                    "linear_quantized",
                    "logprobs",
                    "lora",
                    "pack",
                    "quantized",
                    "scratch",
                    "simd",
                    "stages",
                )
            ],
            extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
    ]
)
