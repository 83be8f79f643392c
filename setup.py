"""Defines the extension modules that are compiled at install. All other metadata is in
pyproject.toml.

The extensions are optional. Without a compiler, Python and torch compute the same results more
slowly, and Tandem logs that.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = "kernels/tandem_kernels/native"
INSTRUCTIONS = ("amx", "avx512_bf16", "avx512", "avx2", "plain")


class BuildAtOnce(build_ext):
    """Compiles the sources of a module in parallel, on all cores.

    Each instruction set is a separate source, which takes half a minute to compile.
    """

    def build_extension(self, ext: Extension) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                made = threads.map(lambda source: compile_in_turn([source], **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_at_once
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_in_turn


setup(
    cmdclass={"build_ext": BuildAtOnce},
    ext_modules=[
        Extension(
            "tandem.common._block_hash",
            ["services/tandem/common/_block_hash.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "tandem.engine.tiers.slots._sketch_cells",
            ["services/tandem/engine/tiers/slots/_sketch_cells.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        # One binary contains all instruction sets; the best one is chosen at run time.
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
                    "block_sums",
                    "blocks",
                    "decoder",
                    "experts",
                    "forward",
                    "fp8",
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
                    "linear_fp8",
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
            # -g0: debug information would be most of the binary and a quarter of the compile time.
            # avoid-fma-max-bits=0: GCC 14 to 16 do not fuse multiply and add in loops
            # with one AVX2 sum, but do in loops with two. The result of a row would
            # depend on the batch.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-g0", "-fopenmp", "-Wno-psabi"),
                "--param=avoid-fma-max-bits=0",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
    ],
)
