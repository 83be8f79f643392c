"""Inputs that hypothesis makes: valid ones with a few changes, and absurd values in each place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hypothesis import strategies as st

ABSURD_NUMBERS = [0, 1, 127, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]


class Target(Protocol):
    """A part of Tandem that reads inputs. `check` raises for an input that does harm."""

    name: str
    inputs: st.SearchStrategy[Any]

    def check(self, value: Any) -> None:
        """Gives one input to the target. Raises AssertionError."""

    def rss_bytes(self) -> int:
        """Returns the memory of the process that reads the inputs."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of some bytes: what is at a place is replaced."""

    place: int
    size: int
    piece: bytes

    def apply(self, data: bytes) -> bytes:
        start = self.place % (len(data) + 1)
        return data[:start] + self.piece + data[start + self.size :]


_PIECES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([struct.pack(f, n) for n in ABSURD_NUMBERS for f in ("<Q", ">Q")]),
    st.sampled_from(
        [b"\x00", b"\xff" * 4, b"\r\n", b"\r\n\r\n", b"\x0a\x7f", b"{" * 50, b"[" * 999]
    ),
)
_SIZES = st.one_of(st.integers(0, 8), st.just(1 << 20))
_CHANGES = st.lists(
    st.builds(Change, st.integers(0, 1 << 12), _SIZES, _PIECES), min_size=1, max_size=4
)


def changed(wholes: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Returns these bytes with up to four changes, or sometimes bytes that are nothing."""

    def apply(whole: bytes, changes: list[Change]) -> bytes:
        for change in changes:
            whole = change.apply(whole)
        return whole

    return st.one_of(
        st.builds(apply, st.sampled_from(wholes), _CHANGES),
        st.builds(apply, st.sampled_from(wholes), _CHANGES),
        st.binary(max_size=64),
    )


_TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "x", "\x00", "<|im_end|>", "a" * 3000, "\ud800"])
)
_NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.sampled_from(ABSURD_NUMBERS),
    st.floats(),
    st.sampled_from([-1.5, 0.5, 1e308, 10**40]),
)
ABSURD = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
)


def absurd_fields(whole: dict[str, Any], names: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Returns the whole with up to three of these fields replaced."""
    more = st.dictionaries(st.sampled_from(names), ABSURD, max_size=3)
    return more.map(lambda fields: whole | fields)
