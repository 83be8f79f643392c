"""Philox4x32-10, a counter-based generator: numbers from (key, counter), with no state between.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and known answers
from Random123. CUDA's generator of that name is the same function.
"""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words from four 32-bit words and a key of two."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ low, right & _MASK, (left >> 32) ^ d ^ high, left & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """Returns 53 random bits in [0, 1): a function of the seed's and the position's low 64 bits."""
    counter = (position & _MASK, (position >> 32) & _MASK, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
