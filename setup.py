"""The parts that are compiled at install; everything else is in pyproject.toml.

Optional: where there is no compiler, plain Python does the same, more slowly, and says so.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "services._block_hash",
            ["services/_block_hash.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
