"""Philox against Random123's known answers."""

from __future__ import annotations

import pytest

from tandem_kernels.philox import Words, philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: Words, key: tuple[int, int], answer: Words) -> None:
    assert philox4x32(counter, key) == answer


def test_uniform_is_made_of_the_first_two_words() -> None:
    assert uniform(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53


def test_uniform_depends_on_all_64_bits_of_seed_and_position() -> None:
    draws = {uniform(1 << bit, 0) for bit in range(64)} | {uniform(0, 1 << b) for b in range(64)}
    assert len(draws) == 128
    assert all(0 <= u < 1 for u in draws)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
