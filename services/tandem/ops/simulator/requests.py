"""A simulated request and what became of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.ops.simulator.pace import Sent
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.worker import SimulatedWorker
from tandem.router.admission.calibration import Promise

MIGRATIONS_MAX = 2  # as services/tandem/router/request/migration_budget.py


@dataclass(slots=True, eq=False)
class Request:
    """A request: it is placed, perhaps refused or migrated, then served or failed."""

    arrival: Arrival
    hashes: Sequence[bytes]
    decode: SimulatedWorker | None = None
    decode_task: Task | None = None
    prefill: SimulatedWorker | None = None  # who computes the prompt; decode itself, or a peer
    lease: Task | None = None
    candidates: list[str] = field(default_factory=list)  # prefill workers not asked yet
    holders: list[tuple[str, int]] = field(default_factory=list)  # with the tokens that they have
    refused: frozenset[str] = frozenset()
    num_migrations: int = 0
    num_output_tokens: int = 0  # tokens, on workers that were lost since
    num_output_tokens_here: int = 0  # 1 from the first token on
    is_admitted: bool = False
    promise: Promise | None = None
    first_token_by: float = math.inf  # seconds: a later first token is of no use
    num_submissions: int = 0
    sent: Sent | None = None  # until it is prefilled
    cached_tokens: int = 0  # where it was prefilled, also in tiers there
    loaded_tokens: dict[str, int] = field(default_factory=dict)  # those of tiers, by name
    num_pulled_tokens: int = 0
    first_token_s: float = 0.0  # 0: none yet
    ended_s: float = 0.0
    failure: str = ""  # "", "refused" or "lost"

    @property
    def num_tokens(self) -> int:
        """Tokens of its input where it is now: the prompt, and what was made before."""
        return self.arrival.num_tokens + self.num_output_tokens

    @property
    def tokens_left(self) -> int:
        """Number of tokens to make where it is now."""
        return self.arrival.output_tokens - self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of each token after the first."""
        count = self.arrival.output_tokens - 1
        return (self.ended_s - self.first_token_s) / count if count else 0.0

    def make_task(self, output_tokens: int) -> Task:
        """Returns the task to make so many tokens of it on a worker; of none, it is a lease."""
        return Task(
            self,
            self.num_tokens,
            self.hashes,
            output_tokens,
            returns=self.arrival.in_session,
            first_token_by=math.inf if self.first_token_s else self.first_token_by,
        )
