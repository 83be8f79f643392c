"""A simulated request and what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.placement.shares import Sent
from tandem.simulator.traces import Arrival
from tandem.simulator.workers.worker import Task, Worker

MOVES_MAX = 2  # as services/tandem/router/request/move_budget.py


class Request:
    """Placed, refused and placed again, moved with what it made, then served or failed."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "candidates",
        "decode",
        "decode_task",
        "ended_s",
        "failure",
        "first_token_s",
        "hashes",
        "holders",
        "is_counted",
        "lease",
        "num_made",
        "num_made_here",
        "num_moves",
        "num_pulled_tokens",
        "prefill",
        "refused",
        "sent",
    )

    def __init__(self, arrival: Arrival, hashes: Sequence[bytes]) -> None:
        self.arrival = arrival
        self.hashes = hashes
        self.decode: Worker | None = None
        self.decode_task: Task | None = None
        self.prefill: Worker | None = None  # who computes the prompt; decode itself, or a peer
        self.lease: Task | None = None
        self.candidates: list[str] = []  # prefill workers not asked yet
        self.holders: list[tuple[str, int]] = []  # with the tokens that they have
        self.refused: frozenset[str] = frozenset()
        self.num_moves = 0
        self.num_made = 0  # tokens, on workers that were lost since
        self.num_made_here = 0  # 1 from the first token on
        self.is_counted = False  # as demand
        self.sent: Sent | None = None  # until it is prefilled
        self.cached_tokens = 0
        self.num_pulled_tokens = 0
        self.first_token_s = 0.0  # 0: none yet
        self.ended_s = 0.0
        self.failure = ""  # "", "refused" or "lost"

    @property
    def num_tokens(self) -> int:
        """Of the input where it is now: the prompt, and what was made before it came there."""
        return self.arrival.num_tokens + self.num_made

    @property
    def tokens_left(self) -> int:
        """To make where it is now."""
        return self.arrival.output_tokens - self.num_made

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Of each token after the first."""
        count = self.arrival.output_tokens - 1
        return (self.ended_s - self.first_token_s) / count if count else 0.0
