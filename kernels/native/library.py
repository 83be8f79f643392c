"""The compiled decoder as ctypes sees it: decoder.h's structs, and the functions of api.cpp.

`load` answers None where it was not built (no compiler at install): torch computes then.
Arrays are handed over as addresses; whoever makes a struct keeps what it points to alive.
"""

from __future__ import annotations

import functools
import importlib.machinery
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

PANEL = 16  # outputs side by side in packed weights; head sizes are a multiple of it


class Kind(IntEnum):
    F32 = 0
    BF16 = 1
    I8 = 2


class Matrix(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("num_in", c_int32),
        ("num_out", c_int32),
        ("kind", c_int32),
        ("padding", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("output", Matrix),
        *(
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "inner",
                "vocab",
                "embedding_kind",
            )
        ),
        ("norm_eps", c_float),
        ("num_threads", c_int32),
    )


class Step(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "token_ids",
                "slots",
                "cosines",
                "sines",
                "spans",
                "block_tables",
                "logit_rows",
                "kv",
                "logits",
            )
        ),
        *(
            (name, c_int32)
            for name in ("num_rows", "num_spans", "num_logit_rows", "block_size", "kv_kind")
        ),
    )


class Library:
    """The functions, with their types."""

    def __init__(self, path: Path) -> None:
        self._library = CDLL(str(path))
        signatures = {
            "tandem_instructions": (c_char_p, [c_char_p]),
            "tandem_pack": (
                None,
                [c_void_p, c_int32, c_int64, c_int64, c_int32, c_void_p, c_void_p],
            ),
            "tandem_create": (c_void_p, [POINTER(Model), c_char_p]),
            "tandem_destroy": (None, [c_void_p]),
            "tandem_to_last_kv": (c_int, [c_void_p, POINTER(Step)]),
            "tandem_to_logits": (c_int, [c_void_p, POINTER(Step)]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def instructions(self, wanted: str | None = None) -> str | None:
        """Of what this processor has, the best or the wanted: avx512, avx2 or plain."""
        name = self._library.tandem_instructions(wanted.encode() if wanted else None)
        return name.decode() if name else None

    def pack(
        self, weights: int, weights_kind: Kind, shape: tuple[int, int], kind: Kind
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Panels of weights [out, in] at an address, and for I8 the scale of each output."""
        num_out, num_in = shape
        size = {Kind.F32: 4, Kind.BF16: 2, Kind.I8: 1}[kind]
        padded = -(-num_out // PANEL) * PANEL
        panels = np.empty(padded * num_in * size, np.uint8)
        scales = np.empty(num_out, np.float32) if kind is Kind.I8 else None
        self._library.tandem_pack(
            weights,
            weights_kind,
            num_out,
            num_in,
            kind,
            panels.ctypes.data,
            scales.ctypes.data if scales is not None else None,
        )
        return panels, scales

    def create(self, model: Model, instructions: str | None = None) -> int:
        """A decoder, to be destroyed; MemoryError when there is no room for it."""
        wanted = instructions.encode() if instructions else None
        decoder: int | None = self._library.tandem_create(byref(model), wanted)
        if decoder is None:
            raise MemoryError("the native decoder cannot be made")
        return decoder

    def destroy(self, decoder: int) -> None:
        self._library.tandem_destroy(decoder)

    def to_last_kv(self, decoder: int, step: Step) -> None:
        """All KV of the step's rows into the pool."""
        self._check(self._library.tandem_to_last_kv(decoder, byref(step)))

    def to_logits(self, decoder: int, step: Step) -> None:
        """The rest of the same step."""
        self._check(self._library.tandem_to_logits(decoder, byref(step)))

    def _check(self, failed: int) -> None:
        if failed:
            raise MemoryError("no memory for the activations of this step")


@functools.cache
def load() -> Library | None:
    """None where it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_decoder{suffix}")
        if path.exists():
            return Library(path)
    return None


def address(array: npt.NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data
