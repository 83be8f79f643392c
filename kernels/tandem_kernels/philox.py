"""Philox4x32-10, a counter-based random number generator. Its numbers depend only on a key and a
counter.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Constants and test
vectors are from Random123. CUDA's Philox generator is the same function.
"""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Returns four random 32-bit words for a counter of four words and a key of two."""
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ low, right & _MASK, (left >> 32) ^ d ^ high, left & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """Returns a uniform number in [0, 1) with 53 random bits. It depends only on the low 64 bits of
    `seed` and of `position`."""
    counter = (position & _MASK, (position >> 32) & _MASK, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
