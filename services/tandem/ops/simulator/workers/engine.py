"""A simulated engine: it computes at most one prompt at a time, together with the batch of decoding
sequences.

Time is counted in steps. Each step generates one token for every decoding sequence. If there is a
prompt, the step also computes one chunk of the prompt. The duration of a step:

    without a prompt   step_s + sequence_s * num_sequences
    with a prompt      chunk_s + sequence_s * num_sequences

Here step_s is the fixed time of a decode step, and sequence_s is the time that each decoding
sequence adds. chunk_s is the prefill time of the prompt divided by the number of its chunks. For
example, with step_s = 8 ms, sequence_s = 0.15 ms and 20 sequences, a step without a prompt takes 8
+ 20 * 0.15 = 11 ms.

With a step limit, a chunk beside decoding sequences is so small that the step takes at most the
limit, or 1.5 times as long as without a prompt if that is longer. A real engine does the same
(perf_model/step_time.py).

At step 1000, a sequence with 30 tokens left ends at step 1030, whatever other sequences come and
go. So the engine does not simulate single steps: it computes only the steps at which sequences and
prompts end. Such an event costs O(log num_sequences).
"""

from heapq import heappop, heappush
from itertools import count
from math import ceil
from typing import Generic, TypeVar

from tandem.common.perf_model.rates import WorkerRates

Job = TypeVar("Job")
_CHUNK_UNIT = 16  # a chunk beside decoding sequences has a multiple of so many tokens
_SLOWER_MAX = 1.5
_EPSILON = 1e-9  # numbers of steps that differ by less than this count as equal


class SimulatedEngine(Generic[Job]):
    """The engine of a simulated worker. A job is a prompt or a sequence, and the engine does not
    look inside it."""

    def __init__(self, rates: WorkerRates, step_limit_s: float = 0.0) -> None:
        """`step_limit_s` is the limit of a step with a prompt and decoding sequences; 0: none."""
        self.rates = rates
        self.step_limit_s = step_limit_s
        self.speed = 1.0  # fraction of the full speed; below 1 if other workers use the same cores
        self.prefilling: Job | None = None
        self.prefill_busy_s = 0.0
        # Heap of the decoding sequences, first to end first: (number of the step that generates the
        # last token, serial number, job). The serial number makes the entries comparable.
        self._decoding: list[tuple[float, int, Job]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._steps = 0.0
        self._prefill_end = 0.0
        self._prefill_steps = 1
        self._prefill_tokens = 0
        self._prefill_context = 0
        self._planned_tokens = 0.0  # tokens that were left when the chunks were planned
        self._chunk = 0  # tokens in a chunk
        self._token_s = 0.0  # seconds for a token of the prompt, without the fixed time of a step
        self._chunk_s = 0.0
        self._step_s = rates.decode.step_s

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def prefill(self, job: Job, num_tokens: int, context: int) -> None:
        """Starts the prefill of `num_tokens` tokens. `context` is the number of tokens before them,
        whose KV exists already."""
        assert self.prefilling is None
        rates = self.rates
        seconds = rates.prefill.seconds(num_tokens, context, num_tokens)
        self._token_s = (seconds - rates.prefill.step_s) / num_tokens
        self._prefill_tokens = num_tokens
        self._prefill_context = context
        self.prefilling = job
        self._plan_chunks(num_tokens)
        self._set_step()

    @property
    def chunk_tokens(self) -> int:
        """Largest number of prompt tokens in a step beside the sequences that decode now."""
        most = self.rates.step_tokens
        count = self.num_decoding
        if not (self.step_limit_s and count):
            return most
        decode = self.rates.decode
        prefill = self.rates.prefill
        limit_s = max(self.step_limit_s, _SLOWER_MAX * decode.seconds(count))
        left_s = limit_s - decode.sequence_s * count - prefill.step_s
        token_s = self._token_s if self.prefilling is not None else prefill.token_s
        return min(most, max(1, int(left_s / token_s / _CHUNK_UNIT)) * _CHUNK_UNIT)

    def _plan_chunks(self, num_tokens: float) -> None:
        """Divides the prompt's last `num_tokens` tokens into equal chunks."""
        self._planned_tokens = num_tokens
        self._chunk = self.chunk_tokens
        self._prefill_steps = max(1, ceil(num_tokens / self._chunk - _EPSILON))
        self._prefill_end = self._steps + self._prefill_steps
        tokens_s = self._token_s * num_tokens / self._prefill_steps
        self._chunk_s = self.rates.prefill.step_s + tokens_s

    def decode(self, job: Job, num_tokens: int) -> None:
        """Adds a sequence that generates `num_tokens` tokens, one per step."""
        heappush(self._decoding, (self._steps + num_tokens, next(self._numbers), job))
        self._set_step()

    def prefill_tokens_left(self) -> int:
        return round(self._tokens_left()) if self.prefilling is not None else 0

    def _tokens_left(self) -> float:
        left = (self._prefill_end - self._steps) / self._prefill_steps
        return self._planned_tokens * max(0.0, left)

    def prefill_context(self) -> int:
        """Returns how many tokens of the prompt that is being prefilled already have KV."""
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
        """Returns the time in seconds at which the next job ends, if no other job is added before.
        Returns None if the engine has no jobs."""
        end = self._decoding[0][0] if self._decoding else None
        if self.prefilling is not None and (end is None or self._prefill_end < end):
            end = self._prefill_end
        if end is None:
            return None
        return self._now_s + max(0.0, end - self._steps) * self._step_s / self.speed

    def take_prefilled(self) -> Job | None:
        """If the prefill of the current prompt is done, removes the prompt and returns it. If not,
        returns None."""
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
        """Returns a pair for each decoding sequence: the sequence, and the number of tokens that it
        has left to generate."""
        return [(job, ceil(end - self._steps - _EPSILON)) for end, _, job in self._decoding]

    def drop_all(self) -> list[Job]:
        """Removes all jobs and returns them. A worker that dies calls this."""
        jobs = [job for _, _, job in self._decoding]
        if self.prefilling is not None:
            jobs.append(self.prefilling)
        self._decoding.clear()
        self.prefilling = None
        self._set_step()
        return jobs

    def _set_step(self) -> None:
        decode = self.rates.decode
        if self.prefilling is not None and self.chunk_tokens != self._chunk:
            self._plan_chunks(self._tokens_left())
        if self.prefilling is None:
            self._step_s = decode.seconds(self.num_decoding)
        else:
            self._step_s = self._chunk_s + decode.sequence_s * self.num_decoding
