"""The answers of sequences that have ended, in which other sequences of the same tenant find text
to propose.

A ring of tokens has the last answers of all tenants. New answers overwrite the oldest ones:

    _tokens   ... | context answer end | context answer end | free or overwritten ...
                  ^ _floor                                  ^ _end

The context of an answer is the end of its prompt, so that the first tokens of an answer are found,
too. As in token_index.py, the runs of tokens with the same hash are linked from the newest to the
oldest. Positions count all tokens that were ever added. The item of the ring is the position modulo
its size, and links to positions before `_floor` are void.

Each token has the number of its tenant. A run of tokens is compared only with runs of the same
tenant, and an occurrence ends where its answer ends. So no token of another tenant is ever found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.common.adapter import digest_of
from tandem.engine.speculation.token_index import COMPARED_MAX, link, run_hash, run_hashes
from tandem.engine.types import SequenceSpec

# Number of tokens of the ring, a power of two. A token takes 24 bytes.
TOKENS_MAX = 1 << 20
_END = -1  # follows the last token of each answer
_NONE = 0  # the position before the first one, in links to no run


class Tenant(NamedTuple):
    """Sequences with the same salt and adapter, which may share KV and proposals."""

    cache_salt: bytes
    adapter: str

    @classmethod
    def of(cls, spec: SequenceSpec) -> Tenant:
        return cls(spec.cache_salt, digest_of(spec.adapter))


class RecentAnswers:
    """At most `answers_max` answers, with at most `tokens_max` tokens in all, a power of two."""

    def __init__(
        self,
        *,
        num_tokens: int,
        context: int,
        answers_max: int,
        tokens_max: int = TOKENS_MAX,
    ) -> None:
        """`num_tokens` is the number of tokens of the runs that are found, and `context` the number
        of tokens of each prompt that are kept."""
        self._num_tokens = num_tokens
        self._context = context
        self._answers_max = answers_max
        self._size = tokens_max
        self._bits = tokens_max.bit_length() - 1
        self.clear()

    def clear(self) -> None:
        """Drops all answers and frees their memory."""
        self._answers: deque[tuple[int, Tenant]] = deque()  # first position and tenant of each
        self._num_answers: Counter[Tenant] = Counter()
        self._numbers: dict[Tenant, int] = {}
        # The number of a tenant without answers is given to another one. No position from `_floor`
        # on has it.
        self._unused = list(range(self._answers_max, 0, -1))
        self._floor = self._end = _NONE + 1
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._owners = np.zeros(size, np.int32)
        self._before = np.zeros(size, np.int64)
        self._newest = np.zeros(size, np.int64)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the ring and its index have."""
        arrays = (self._tokens, self._owners, self._before, self._newest)
        return sum(array.nbytes for array in arrays)

    def add(self, tenant: Tenant, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Adds the answer of a sequence that has ended: its tokens after the prompt. Of a long
        answer, only the last tokens are kept."""
        first = max(0, num_prompt_tokens - self._context, len(token_ids) - self._size // 2)
        tokens = np.array([*token_ids[first:], _END], np.int32)
        num_runs = len(tokens) - self._num_tokens
        if len(token_ids) - num_prompt_tokens < 2 or num_runs < 1:
            return  # nothing could be proposed
        if not len(self._tokens):
            self._allocate(self._size)
        start, end = self._end, self._end + len(tokens)
        while self._answers and (
            len(self._answers) >= self._answers_max or self._answers[0][0] < end - self._size
        ):
            self._drop_oldest()
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = self._unused.pop()
        self._num_answers[tenant] += 1
        self._answers.append((start, tenant))
        self._floor, self._end = self._answers[0][0], end
        places = np.arange(start, end) & (self._size - 1)
        self._tokens[places] = tokens
        self._owners[places] = number
        self._before[places] = _NONE
        hashes = run_hashes(tokens[:-1].astype(np.uint64), self._num_tokens, number)
        hashes >>= np.uint64(32 - self._bits)
        last = start + self._num_tokens - 1
        self._before[places[self._num_tokens - 1 : -1]] = link(
            hashes.astype(np.int64), self._newest, last
        )

    def _drop_oldest(self) -> None:
        _, tenant = self._answers.popleft()
        self._num_answers[tenant] -= 1
        if not self._num_answers[tenant]:
            del self._num_answers[tenant]
            self._unused.append(self._numbers.pop(tenant))

    def find(self, tenant: Tenant, token_ids: Sequence[int], most: int) -> tuple[int, int]:
        """Returns (position after the best occurrence of the list's last tokens in the answers of a
        tenant, number of tokens that are equal there, up to `most`). Returns (0, 0) if there is
        none. Of several with the most equal tokens, it is the newest one."""
        number = self._numbers.get(tenant)
        last = len(token_ids) - 1
        if number is None or last + 1 < self._num_tokens:
            return 0, 0
        value = run_hash(token_ids, last, self._num_tokens, number)
        at = int(self._newest[value >> (32 - self._bits)])
        if at < self._floor:
            return 0, 0
        tokens, owners, before = self._tokens.data, self._owners.data, self._before.data
        mask = self._size - 1
        best, best_length = 0, 0
        for _ in range(COMPARED_MAX):
            if at < self._floor:
                break
            if owners[at & mask] == number:
                length = 0
                longest = min(most, last + 1, at + 1 - self._floor)
                while length < longest and tokens[at - length & mask] == token_ids[last - length]:
                    length += 1
                if length > best_length:
                    best, best_length = at + 1, length
                    if length == most:
                        break
            at = before[at & mask]
        return (best, best_length) if best_length >= self._num_tokens else (0, 0)

    def after(self, position: int, count: int) -> list[int]:
        """Returns at most `count` tokens of one answer, from a position of `find` on."""
        end = min(position + count, self._end)
        found: list[int] = self._tokens[np.arange(position, end) & (self._size - 1)].tolist()
        return found[: found.index(_END)] if _END in found else found
