"""Generates inputs: hypothesis creates the first ones of a batch, and random mutations of those the
rest.

Hypothesis takes milliseconds for an input, while most parsers take microseconds. So it creates one
of every `PER_SEED` inputs; the others are one or two of these with a few mutations. A batch depends
only on its seed.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

PER_SEED = 100
ABSURD_NUMBERS = [0, 1, 127, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]

_Seed = TypeVar("_Seed")


class Source(Protocol[_Seed]):
    """A generator of one kind of input."""

    @property
    def seeds(self) -> st.SearchStrategy[_Seed]: ...

    def input_of(self, seeds: Sequence[_Seed], chance: random.Random) -> Any:
        """Creates an input from one or more of the seeds."""


def batch_of(source: Source[Any], base_seed: int, size: int) -> list[Any]:
    """Creates `size` inputs, always the same for a seed."""
    found: list[Any] = []

    @seed(base_seed)
    @settings(
        max_examples=max(20, size // PER_SEED),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(source.seeds)
    def collect(value: object) -> None:
        found.append(value)

    collect()
    chance = random.Random(base_seed)
    return [source.input_of(found, chance) for _ in range(size)]


_PIECES = [
    *(struct.pack(form, number) for number in ABSURD_NUMBERS for form in ("<Q", ">Q")),
    *(b"\x00", b"\xff" * 4, b"\r\n", b"\r\n\r\n", b"\x0a\x7f", b"{" * 50, b"[" * 999, b'"', b"\\u"),
    *(b"-1", b"1e999", b"null", b"NaN", b"\xc3\x28", b"\xed\xa0\x80", b"99999999999999999999"),
]


def changed(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Mutates bytes up to four times: flips, replaces, cuts, duplicates, or joins them with the end
    of another input."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(data))
        kind = chance.randrange(6)
        end = min(len(data), start + chance.choice((1, 1, 2, 4, 8, 16, 64)))
        if kind == 0 and start < len(data):
            flipped = data[start] ^ 1 << chance.randrange(8)
            data = data[:start] + bytes([flipped]) + data[start + 1 :]
        elif kind == 1:
            data = data[:start] + chance.choice(_PIECES) + data[end:]
        elif kind == 2:
            data = data[:start] + chance.randbytes(end - start) + data[end:]
        elif kind == 3:
            data = data[:start] + data[end:] if chance.random() < 0.8 else data[:start]
        elif kind == 4:
            data = data[:end] + data[start:end] * chance.choice((1, 1, 50)) + data[end:]
        else:
            other = chance.choice(others)
            data = data[:start] + other[chance.randint(0, len(other)) :]
    return data


class Bytes:
    """Valid bytes and their mutations."""

    def __init__(self, wholes: Sequence[bytes]) -> None:
        self._wholes = wholes
        self.seeds = st.one_of(
            st.sampled_from(wholes), st.tuples(st.sampled_from(wholes), st.binary(max_size=64))
        ).map(lambda seed: seed if isinstance(seed, bytes) else seed[0] + seed[1])

    def input_of(self, seeds: Sequence[bytes], chance: random.Random) -> bytes:
        if chance.random() < 0.05:
            return chance.randbytes(chance.randrange(64))
        return changed(chance.choice(seeds), self._wholes, chance)


_TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "x", "\x00", "<|im_end|>", "a" * 3000, "\ud800"])
)
_NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.sampled_from(ABSURD_NUMBERS),
    st.floats(),
    st.sampled_from([-1.5, 0.5, 1e308, 10**40]),
)
_ABSURD = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
)
Fields = dict[str, Any]


class Objects:
    """Objects with up to three extreme field values, and their mutations.

    An input is one object with up to two fields of another.
    """

    def __init__(self, wholes: Sequence[Fields], names: Sequence[str]) -> None:
        values = st.dictionaries(st.sampled_from(sorted(names)), _ABSURD, max_size=3)
        self.seeds = st.builds(lambda one, more: one | more, st.sampled_from(wholes), values)

    def input_of(self, seeds: Sequence[Fields], chance: random.Random) -> Any:
        one, other = chance.choice(seeds), chance.choice(seeds)
        names = chance.sample(sorted(other), min(len(other), chance.randrange(3)))
        return one | {name: _nested(other[name], chance) for name in names}


def _nested(value: Any, chance: random.Random) -> Any:
    """Returns the value, sometimes replaced by one of its parts or nested in another value."""
    kind = chance.randrange(6)
    if kind == 0 and isinstance(value, list | dict) and value:
        return chance.choice(list(value.values() if isinstance(value, dict) else value))
    if kind == 1:
        return [value] * chance.choice((1, 2, 200))
    if kind == 2:
        return {"x": value}
    return value


class JsonBytes(Objects):
    """Objects encoded as JSON; every second one is also mutated as bytes."""

    def input_of(self, seeds: Sequence[Fields], chance: random.Random) -> bytes:
        text = json.dumps(super().input_of(seeds, chance)).encode()
        return changed(text, [text], chance) if chance.random() < 0.5 else text


class PackedBytes(Objects):
    """Objects encoded as msgpack; every second one is also mutated as bytes."""

    def input_of(self, seeds: Sequence[Fields], chance: random.Random) -> bytes:
        try:
            data = msgspec.msgpack.encode(super().input_of(seeds, chance))
        except (OverflowError, UnicodeEncodeError):  # numbers above 64 bits, lone surrogates
            return b""
        return changed(data, [data], chance) if chance.random() < 0.5 else data


class OneOf:
    """Inputs of several sources, each with the name of its source."""

    def __init__(self, sources: dict[str, Source[Any]]) -> None:
        self._sources = sources
        self.seeds = st.one_of(
            [st.tuples(st.just(name), source.seeds) for name, source in sources.items()]
        )

    def input_of(self, seeds: Sequence[tuple[str, Any]], chance: random.Random) -> tuple[str, Any]:
        name, seed = chance.choice(seeds)
        others = [other for kind, other in chance.choices(seeds, k=8) if kind == name]
        return name, self._sources[name].input_of([seed, *others], chance)
