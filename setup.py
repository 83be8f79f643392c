"""Defines the extension modules that are compiled at install. All other metadata is in
pyproject.toml.

The CPU kernels are required; `kernels/native_build.py` compiles them. The small modules are
optional: without them, Tandem works more slowly, and logs that.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from native_build import BuildError, build, wanted_sets

NATIVE = Path("kernels/tandem_kernels/native")
KERNELS = "tandem_kernels.native._decoder"


class BuildKernels(build_ext):
    """Compiles the kernels: for an editable install for this processor, for a wheel for all."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name != KERNELS:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(target, wanted_sets(all_by_default=not self.editable_mode))
        except BuildError as error:
            raise SystemExit(f"the CPU kernels cannot be built: {error}") from None


setup(
    cmdclass={"build_ext": BuildKernels},
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
        Extension(
            "tandem.prefix_index._replica_table",
            ["services/tandem/prefix_index/_replica_table.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        # Compiled by `BuildKernels`; the lists say what a source distribution has to contain.
        Extension(
            KERNELS,
            [str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=["kernels/native_build.py", *map(str, sorted(NATIVE.glob("*.h")))],
        ),
    ],
)
