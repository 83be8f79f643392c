"""Makes Triton's interpreter fast enough for complete models. Called by conftests of kernel
tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import triton


class _Nothing:
    """Replaces the object with which the interpreter restores functions after a launch."""

    def restore(self) -> None:
        """Does nothing: the interpreter's functions stay in place."""


def patch_once() -> None:
    """Patches the interpreter in this process, once.

    Before each launch, and before each function that a kernel calls, the interpreter lists the
    names of Triton's language and replaces those that it implements. The patch does this once for
    each module of kernels and leaves them replaced, because nothing else uses the language in an
    interpreting process. The interpreter also builds a table of all types for each computed number;
    the patch builds it once.
    """
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if patch.__module__ == __name__:
        return
    nothing = _Nothing()
    patched: set[int] = set()

    def patch_new(function: FunctionType) -> _Nothing:
        module = id(function.__globals__)
        if module not in patched:
            patch(function)
            patched.add(module)
        return nothing

    of_type = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        """Maps a Triton type to NumPy's type of a different name."""
        name = str(dtype.scalar)
        if name not in found:
            found[name] = of_type(dtype)
        return found[name]

    interpreter._patch_lang = patch_new
    interpreter._get_np_dtype = find


@contextmanager
def unchecked_sums() -> Iterator[None]:
    """Makes the interpreter skip the overflow check of integer sums and products, which computes
    them again in 64 bits."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    options = builder.options
    builder.options = replace(options, sanitize_overflow=False)
    yield
    builder.options = options
