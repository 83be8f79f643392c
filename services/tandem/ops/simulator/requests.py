"""The state of a simulated request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.ops.simulator.pace import Sent
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.worker import SimulatedWorker
from tandem.router.admission.calibration import Promise

MIGRATIONS_MAX = 2  # as in services/tandem/router/request/migration_budget.py


@dataclass(slots=True, eq=False)
class Request:
    """A request. It is placed, may be refused or migrated, and is served or fails."""

    arrival: Arrival
    hashes: Sequence[bytes]
    decode: SimulatedWorker | None = None
    decode_task: Task | None = None
    prefill: SimulatedWorker | None = None  # worker that prefills: the decode worker or a peer
    lease: Task | None = None
    candidates: list[str] = field(default_factory=list)  # ids of prefill workers not yet tried
    # (worker id, number of prefix tokens) for each worker from which the prefix may be pulled
    holders: list[tuple[str, int]] = field(default_factory=list)
    refused: frozenset[str] = frozenset()
    num_migrations: int = 0
    num_output_tokens: int = 0  # tokens generated on earlier workers, which have died
    # Tokens generated on the current worker. The number is 1 from the first token until the worker
    # dies, and then becomes exact.
    num_current_output_tokens: int = 0
    is_admitted: bool = False
    promise: Promise | None = None
    first_token_by: float = math.inf  # time in s after which a first token is useless
    num_submissions: int = 0
    sent: Sent | None = None  # the prompt's entry in the router's view until its first token
    # Prompt tokens cached in the pool or in a tier of the worker that prefilled.
    cached_tokens: int = 0
    # Number of tokens loaded from tiers, by tier name.
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_pulled_tokens: int = 0
    first_token_s: float = 0.0  # 0: no token yet
    ended_s: float = 0.0
    failure: str = ""  # "", "refused" or "lost"

    @property
    def num_tokens(self) -> int:
        """Input tokens on the current worker: the prompt and the tokens generated on earlier
        workers."""
        return self.arrival.num_tokens + self.num_output_tokens

    @property
    def tokens_left(self) -> int:
        """Number of tokens to generate on the current worker."""
        return self.arrival.output_tokens - self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        count = self.arrival.output_tokens - 1
        return (self.ended_s - self.first_token_s) / count if count else 0.0

    def make_task(self, output_tokens: int) -> Task:
        """Makes the task that generates `output_tokens` tokens on a worker; 0 makes a lease."""
        return Task(
            self,
            self.num_tokens,
            self.hashes,
            output_tokens,
            returns=self.arrival.in_session,
            first_token_by=math.inf if self.first_token_s else self.first_token_by,
        )
