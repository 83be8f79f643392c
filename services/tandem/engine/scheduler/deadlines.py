"""Finds sequences whose first token would be late, before any of their tokens is computed.

- `check` runs when a sequence arrives. It predicts the time to compute all queued prompts and the
  new one. A prediction over many prompts may be wrong, so `check` refuses only sequences that would
  be late even if this engine were `RATES_OFF` times as fast as predicted. A sequence that finds the
  engine idle is never refused, because refusing it would help no other sequence.
- `find_late` runs while sequences wait. It predicts when each sequence would have its first token
  if it were computed next, and refuses those that would be late even then. This prediction is more
  precise, because it covers little more than the sequence's own prompt. So `find_late` enforces the
  deadlines even if several routers independently sent too many requests.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from tandem.common.perf_model.predict import OWN_SPARE, RATES_OFF, queued_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.engine.sequence import Sequence
from tandem.engine.types import Mode
from tandem.errors import Overloaded


class Deadlines:
    """Checks the deadlines of an engine's sequences (`SequenceSpec.first_token_by`).

    `rates` returns how fast this engine computes prompts in steps that also decode its current
    sequences, or None before this was measured.
    """

    def __init__(
        self,
        rates: Callable[[], WorkerRates | None],
        has_rates: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._rates = rates
        # Returns False while `rates` would return None. Cheaper than `rates`.
        self._has_rates = has_rates
        self.clock = clock

    def rates(self) -> WorkerRates | None:
        """Returns the rates with which deadlines are checked; None before they were measured."""
        return self._rates()

    def queued_s(self, sequences: Iterable[Sequence]) -> float | None:
        """Predicts the seconds until all missing prompt tokens of these sequences are computed.
        Returns None if no rates are measured."""
        spans = [span for s in sequences if (span := s.missing_span)[0]]
        if not spans and self._has_rates():
            return 0.0
        rates = self._rates()
        return None if rates is None else queued_seconds(rates, spans)

    def check(self, new: Sequence, before: Iterable[Sequence]) -> None:
        """Raises Overloaded if a new sequence would be late when it is computed after the sequences
        in `before`."""
        by = new.spec.first_token_by
        if not by or new.mode is Mode.WAITING_FOR_REMOTE_KV:
            return
        ahead_s = self.queued_s(before)
        rates = self._rates()
        if not ahead_s or rates is None:
            return
        own_s = queued_seconds(rates, [new.missing_span])
        late_s = (ahead_s + own_s) / RATES_OFF - (by - self.clock())
        if late_s > 0:
            raise _overloaded(late_s)

    def find_late(self, sequences: Collection[Sequence]) -> Iterator[tuple[Sequence, Overloaded]]:
        """Yields each waiting sequence that would be late even if it were computed directly after
        the sequences that have started."""
        waiting = [s for s in sequences if s.spec.first_token_by and s.has_waited]
        waiting = [s for s in waiting if not s.is_begun]
        if not waiting:
            return
        begun_s = self.queued_s(s for s in sequences if s.is_begun) or 0.0
        now = self.clock()
        rates = self._rates()
        for sequence in waiting:
            own_s = 0.0 if rates is None else queued_seconds(rates, [sequence.missing_span])
            late_s = now + begun_s + OWN_SPARE * own_s - sequence.spec.first_token_by
            if late_s > 0:
                yield sequence, _overloaded(late_s)


def _overloaded(late_s: float) -> Overloaded:
    return Overloaded(
        f"this worker would send the first token of the request {late_s:.1f} s after the limit "
        "(--ttft-limit)",
        retry_after_s=late_s,
    )
