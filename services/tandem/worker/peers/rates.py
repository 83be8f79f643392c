"""What this worker measured: how fast its engine is, and how fast blocks come from each peer.

Fed by step reports and by pulls; read by the record, by deadlines, and by the choice where to
prefill. A pair is a peer and a transport; the one in use is what others are told of. Nothing here
waits, and nothing reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.config import WorkerConfig
from tandem.cost_model import PairRate, WorkerRates, default_pair
from tandem.engine.types import StepReport
from tandem.rate_meters import DecodeMeter, PairMeter, PrefillMeter

HANG_FLOOR_S = 5.0  # no engine counts as hung sooner
_HANG_TURNS = 10
_DEADLINE_FACTOR = 20
_DEADLINE_MIN_S = 1.0
_TURN_KEEP = 0.98  # of the longest turn, at each shorter one
_PREFILL_SHARE_MIN = 0.1  # of a mixed step, whatever its decode part is predicted to take
_RETRY_S = (0.1, 30.0)
_INTERVAL_KEEP = 0.8


class Rates:
    """The meters of one worker."""

    def __init__(self, config: WorkerConfig, *, block_bytes: int, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._deadline_s_max = config.transfer.pull_deadline_s
        self._delay_s = config.transfer.delay_s
        self._block_bytes = block_bytes
        self._prefill = PrefillMeter()
        self._decode = DecodeMeter()
        self._meters: dict[tuple[str, str], PairMeter] = {}  # by peer's worker id and transport
        self._failures: dict[tuple[str, str], int] = {}
        self._in_use: dict[str, str] = {}  # peer's worker id -> transport
        self._ended_at = 0.0
        self._end_interval_s = 1.0
        self._longest_turn_s = 0.0  # of a step, lately

    def on_step(self, report: StepReport) -> None:
        """Learns from a step. A mixed one tells of prefill what its decode part leaves."""
        seconds = report.step_ms / 1000
        num_prefill, num_decode = report.num_prefill_tokens, report.num_decode_tokens
        if not (num_prefill or num_decode):
            return
        self._longest_turn_s = max(seconds, self._longest_turn_s * _TURN_KEEP)
        if not num_prefill:
            self._decode.observe(num_decode, seconds)
            return
        left = seconds - self._decode.rate.sequence_s * num_decode
        self._prefill.observe(
            num_prefill,
            report.num_prefill_context_tokens,
            max(left, _PREFILL_SHARE_MIN * seconds),
        )

    @property
    def turn_s_max(self) -> float:
        """The longest turn to expect: of those seen lately, and a whole budget of prefill, which
        may come after many short ones. 0: prefill was not measured yet."""
        if not self._prefill.num_observations:
            return 0.0
        full_s = self._prefill.rate.seconds(self._step_tokens, 0, self._step_tokens)
        return max(self._longest_turn_s, full_s)

    def on_end(self, now: float) -> None:
        """A sequence left this worker: a place came free."""
        if self._ended_at:
            interval_s = now - self._ended_at
            self._end_interval_s += (1 - _INTERVAL_KEEP) * (interval_s - self._end_interval_s)
        self._ended_at = now

    @property
    def retry_after_s(self) -> float:
        """When a place in the queue is likely to be free again."""
        shortest, longest = _RETRY_S
        return min(longest, max(shortest, self._end_interval_s))

    @property
    def worker(self) -> WorkerRates:
        """For the record."""
        return WorkerRates(
            prefill=self._prefill.rate,
            decode=self._decode.rate,
            step_tokens=self._step_tokens,
            block_bytes=self._block_bytes,
            measured=bool(self._prefill.num_observations),
        )

    @property
    def pairs(self) -> dict[str, PairRate]:
        """Peer's worker id -> the rate of what is in use, a first guess where nothing came yet."""
        return {
            worker_id: self._rate(worker_id, transport)
            for worker_id, transport in self._in_use.items()
        }

    def on_pull(self, worker_id: str, transport: str, num_bytes: int, seconds: float) -> None:
        """A pull that ended well, or a probe."""
        key = (worker_id, transport)
        if key not in self._meters:
            self._meters[key] = PairMeter(transport)
        self._meters[key].observe(num_bytes, seconds)
        self._failures.pop(key, None)

    def on_pull_failed(self, worker_id: str, transport: str) -> None:
        key = (worker_id, transport)
        self._failures[key] = self._failures.get(key, 0) + 1

    def failures(self, worker_id: str, transport: str) -> int:
        """Pulls that failed since the last one that ended well."""
        return self._failures.get((worker_id, transport), 0)

    def on_probe(self, worker_id: str, transport: str, reads: Iterable[tuple[int, float]]) -> None:
        """The pair was measured by itself: what was known of it before is forgotten."""
        reads = list(reads)
        if reads:
            self._meters.pop((worker_id, transport), None)
        for num_bytes, seconds in reads:
            self.on_pull(worker_id, transport, num_bytes, seconds)

    def use(self, worker_id: str, transport: str) -> None:
        """From now on its blocks come over this transport."""
        self._in_use[worker_id] = transport

    def forget(self, worker_id: str) -> None:
        self._in_use.pop(worker_id, None)
        for key in [key for key in self._meters if key[0] == worker_id]:
            del self._meters[key]
        for key in [key for key in self._failures if key[0] == worker_id]:
            del self._failures[key]

    def pair(self, worker_id: str, transport: str | None = None) -> PairRate | None:
        """As measured, of the transport in use if none is named; None: nothing came yet."""
        transport = transport or self._in_use.get(worker_id, "")
        meter = self._meters.get((worker_id, transport))
        return meter.rate if meter is not None and meter.num_observations else None

    def pull_deadline_s(self, worker_id: str, num_bytes: int) -> float:
        """Of one pull: far above what the pair needs, at most what the config says."""
        rate = self.pair(worker_id)
        if rate is None:
            return self._deadline_s_max
        wide_s = _DEADLINE_MIN_S + self._delay_s + _DEADLINE_FACTOR * rate.seconds(num_bytes)
        return min(self._deadline_s_max, wide_s)

    def _rate(self, worker_id: str, transport: str) -> PairRate:
        return self.pair(worker_id, transport) or default_pair(transport)


def hang_timeout_s(turn_s_max: float, heartbeat_timeout_s: float) -> float:
    """How long a source's step counter may stand still: ten of its longest turns lately.

    A source that names no turn (0) gets all of `heartbeat_timeout_s`.
    """
    if turn_s_max <= 0:
        return heartbeat_timeout_s
    return min(heartbeat_timeout_s, max(HANG_FLOOR_S, _HANG_TURNS * turn_s_max))
