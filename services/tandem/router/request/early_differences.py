"""Finds early differences between prompts, which prevent the reuse of KV. Does no I/O.

A prompt can reuse KV of another one only up to the first token that differs. If a client writes the
time or a counter near the beginning of each prompt, nearly nothing is reused, although the rest is
equal. This module keeps the first tokens of the latest prompts in memory, and compares each new
prompt with those that may share KV with it.
"""

import array
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PROMPTS_MAX = 64  # number of the latest prompts that are kept
TOKENS_MIN = 256  # shorter prompts are neither kept nor compared
TOKENS_MAX = 8192  # number of first tokens that are kept of each prompt
# If more than this part of a prompt is equal, the difference is not early.
EARLY_SHARE = 0.5
_ITEM = array.array("I").itemsize
# The rest of two prompts counts as equal if the earlier prompt has most of these windows of the
# later one, at any place.
_WINDOWS = 8
_WINDOW_TOKENS = 24
_WINDOWS_EQUAL = 5
_RESTS_MAX = 8  # the rests of at most so many prompts are compared, which bounds the time


@dataclass(frozen=True, slots=True)
class EarlyDifference:
    """A prompt that is like an earlier one but for an early difference."""

    num_equal: int  # number of leading tokens that both have
    ago_s: float  # seconds since the earlier prompt

    @property
    def sentence(self) -> str:
        return (
            f"The prompt differs from token {self.num_equal + 1} on from a prompt seen "
            f"{_words(self.ago_s)} ago. The text after it is nearly the same."
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    root: bytes
    tokens: bytes
    at: float


@dataclass(slots=True)
class RecentPrompts:
    """The latest prompts of a router."""

    _seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=PROMPTS_MAX))

    def compare(
        self, root: bytes, token_ids: Sequence[int], now: float | None = None
    ) -> EarlyDifference | None:
        """Compares a prompt with the earlier ones, and keeps it. Returns None if there is no early
        difference, or if an earlier prompt has most of the prompt.

        `root` identifies the prompts that may share KV, such as those of one tenant.
        """
        if len(token_ids) < TOKENS_MIN:
            return None
        now = time.monotonic() if now is None else now
        tokens = array.array("I", token_ids[:TOKENS_MAX]).tobytes()
        found: EarlyDifference | None = None
        is_known = False
        num_rests = 0
        for seen in reversed(self._seen):
            if seen.root != root:
                continue
            num_equal = _num_equal(tokens, seen.tokens)
            if num_equal * _ITEM > EARLY_SHARE * len(tokens):
                is_known = True
                break
            if num_rests < _RESTS_MAX and (found is None or num_equal > found.num_equal):
                num_rests += 1
                at = num_equal * _ITEM
                if _has_same_rest(tokens[at:], seen.tokens[at:]):
                    found = EarlyDifference(num_equal, now - seen.at)
        self._seen.append(_Seen(root, tokens, now))
        return None if is_known else found


def _words(seconds: float) -> str:
    """Writes a time in words, such as `1 second`, `2 minutes` or `3 hours`."""
    name, unit_s = ("second", 1) if seconds < 60 else ("minute", 60)
    if seconds >= 3600:
        name, unit_s = "hour", 3600
    number = max(1, int(seconds / unit_s))
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _num_equal(one: bytes, other: bytes) -> int:
    """Returns the number of leading tokens that are equal."""
    low, high = 0, min(len(one), len(other)) // _ITEM
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _ITEM] == other[: middle * _ITEM]:
            low = middle
        else:
            high = middle - 1
    return low


def _has_same_rest(rest: bytes, other: bytes) -> bool:
    num_tokens = len(rest) // _ITEM
    step = (num_tokens - _WINDOW_TOKENS) // _WINDOWS
    if step < 1:
        return False
    starts = range(step, step * (_WINDOWS + 1), step)
    windows = [rest[at * _ITEM : (at + _WINDOW_TOKENS) * _ITEM] for at in starts]
    return sum(window in other for window in windows) >= _WINDOWS_EQUAL
