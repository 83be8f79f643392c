"""A simulated engine: one prefill at a time together with the decode batch, in virtual time.

Virtual time counts steps. Each step generates one token for every decoding sequence and computes
one chunk of the current prompt, if there is one. A step takes

    prefill seconds / prefill steps + sequence_s * sequences     with a prompt
    step_s + sequence_s * sequences                              without a prompt

A sequence with n tokens left therefore ends at virtual time now + n, independently of other
sequences. An event costs O(log sequences).
"""

from heapq import heappop, heappush
from itertools import count
from math import ceil
from typing import Generic, TypeVar

from tandem.common.perf_model.rates import WorkerRates

Job = TypeVar("Job")
_EPSILON = 1e-9  # tolerance for rounding errors, in steps


class SimulatedEngine(Generic[Job]):
    """The engine of a simulated worker. Jobs are opaque to the engine."""

    def __init__(self, rates: WorkerRates) -> None:
        self.rates = rates
        self.speed = 1.0  # below 1 if other workers use the same cores
        self.prefilling: Job | None = None
        self.prefill_busy_s = 0.0
        # Heap of (virtual time of the last token, serial number, job).
        self._decoding: list[tuple[float, int, Job]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._steps = 0.0
        self._prefill_end = 0.0
        self._prefill_steps = 1
        self._prefill_tokens = 0
        self._prefill_context = 0
        self._chunk_s = 0.0
        self._step_s = rates.decode.step_s

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def prefill(self, job: Job, num_tokens: int, context: int) -> None:
        """Starts the prefill of `num_tokens` tokens. The `context` tokens before them are already
        computed."""
        assert self.prefilling is None
        rates = self.rates
        self._prefill_steps = -(-num_tokens // rates.step_tokens)
        seconds = rates.prefill.seconds(num_tokens, context, rates.step_tokens)
        self._chunk_s = seconds / self._prefill_steps
        self._prefill_end = self._steps + self._prefill_steps
        self._prefill_tokens = num_tokens
        self._prefill_context = context
        self.prefilling = job
        self._set_step()

    def decode(self, job: Job, num_tokens: int) -> None:
        """Adds a sequence that generates `num_tokens` tokens, one per step."""
        heappush(self._decoding, (self._steps + num_tokens, next(self._numbers), job))
        self._set_step()

    def prefill_tokens_left(self) -> int:
        if self.prefilling is None:
            return 0
        left = (self._prefill_end - self._steps) / self._prefill_steps
        return round(self._prefill_tokens * max(0.0, left))

    def prefill_context(self) -> int:
        """Returns how many tokens of the current prompt are already computed."""
        return self._prefill_context + self._prefill_tokens - self.prefill_tokens_left()

    def advance(self, now_s: float) -> None:
        """Advances the engine to `now_s`, which must not be later than `next_at`."""
        passed_s = now_s - self._now_s
        if passed_s > 0:
            self._steps += passed_s * self.speed / self._step_s
            if self.prefilling is not None:
                self.prefill_busy_s += passed_s
            self._now_s = now_s

    def next_at(self) -> float | None:
        """Returns the time at which the next job ends if nothing changes; None if the engine is
        idle."""
        end = self._decoding[0][0] if self._decoding else None
        if self.prefilling is not None and (end is None or self._prefill_end < end):
            end = self._prefill_end
        if end is None:
            return None
        return self._now_s + max(0.0, end - self._steps) * self._step_s / self.speed

    def take_prefilled(self) -> Job | None:
        """Removes and returns the current prompt if its prefill is done; else None."""
        job = self.prefilling
        if job is None or self._prefill_end > self._steps + _EPSILON:
            return None
        self.stop_prefill()
        return job

    def stop_prefill(self) -> None:
        self.prefilling = None
        self._set_step()

    def take_decoded(self) -> list[Job]:
        """Removes and returns the sequences that have generated their last token."""
        done = []
        while self._decoding and self._decoding[0][0] <= self._steps + _EPSILON:
            done.append(heappop(self._decoding)[2])
        if done:
            self._set_step()
        return done

    def tokens_left(self) -> list[tuple[Job, int]]:
        """Returns each decoding sequence with its number of remaining tokens."""
        return [(job, ceil(end - self._steps - _EPSILON)) for end, _, job in self._decoding]

    def drop_all(self) -> list[Job]:
        """Removes and returns all jobs, for a worker that dies."""
        jobs = [job for _, _, job in self._decoding]
        if self.prefilling is not None:
            jobs.append(self.prefilling)
        self._decoding.clear()
        self.prefilling = None
        self._set_step()
        return jobs

    def _set_step(self) -> None:
        decode = self.rates.decode
        if self.prefilling is None:
            self._step_s = decode.seconds(self.num_decoding)
        else:
            self._step_s = self._chunk_s + decode.sequence_s * self.num_decoding
