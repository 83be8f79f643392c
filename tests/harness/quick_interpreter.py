"""Makes Triton's interpreter quick enough for whole models; conftests of kernels' tests call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import triton


class _Nothing:
    """The interpreter restores this after a launch."""

    def restore(self) -> None:
        """Leaves the interpreter's functions where they are."""


def patch_once() -> None:
    """Changes the interpreter of this process, if it has one that is not changed yet.

    Before each launch, and before each function that a kernel calls, the interpreter lists the
    names of Triton's language and puts its own functions in the place of those that it finds. Now
    it does so once for each module of kernels, and leaves them there: nothing else uses the
    language in a process that interprets. It also makes a table of all types for each number that
    it computes.
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
        """Returns NumPy's type of a type, whose names differ."""
        name = str(dtype.scalar)
        if name not in found:
            found[name] = of_type(dtype)
        return found[name]

    interpreter._patch_lang = patch_new
    interpreter._get_np_dtype = find


@contextmanager
def unchecked_sums() -> Iterator[None]:
    """The interpreter computes each sum and product of integers once, and not again in 64 bits to
    find what overflows."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    options = builder.options
    builder.options = replace(options, sanitize_overflow=False)
    yield
    builder.options = options
