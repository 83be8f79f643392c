"""Finds workers that do not respond, from the worker records that a process (the reader) reads
again and again. This module does no I/O.

    a worker is    if
    silent         its record's `num_writes`, which grows with each write, no longer grows: the
                   process has stopped, has ended or has lost the connection to Redis
    stuck          it still writes its record, but the engine has work and finishes no step
    lost           it is silent or stuck, or the reader waited in vain for a reply of the worker

The reader notices a silent worker long before the worker's record expires.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.predict import queue_seconds
from tandem.net.store.registry import WorkerRecord

# A worker counts as silent if it has not written its record for this many write intervals.
_WRITES_MAX = 3
# A worker counts as stuck if its engine finishes no step in the time in which it should finish this
# many steps of the largest size.
_TURNS_MAX = 3
_LOST_S = 30.0


@dataclass(slots=True)
class _Heard:
    """The last known state of a worker process. Times are in seconds of the reader's monotonic
    clock."""

    record: WorkerRecord
    wrote_at: float
    turned_at: float
    # Time of the last call of `note_lost` for this worker; -inf if the engine has finished a step
    # since this call.
    lost_at: float = -math.inf


class Silences:
    """Tracks which workers are silent, stuck or lost. The reader passes the records of all workers
    to `note` after each read.

    While Redis is unreachable no records are read, so no worker becomes silent.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._limit_s = _WRITES_MAX * cluster.record_interval_s
        self._heard: dict[str, _Heard] = {}
        self._now = 0.0

    def note(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Updates the state of all workers from their records, which the reader read at `now`."""
        self._now = now
        before = self._heard
        self._heard = {}
        for record in records:
            heard = before.get(record.worker_id)
            if heard is None or heard.record.epoch != record.epoch:
                heard = _Heard(record, now, now)
            if record.num_writes != heard.record.num_writes or not record.num_writes:
                heard.wrote_at = now
            has_turned = record.load.step != heard.record.load.step
            if has_turned or not _has_work(record):
                heard.turned_at = now
            if has_turned:
                heard.lost_at = -math.inf
            heard.record = record
            self._heard[record.worker_id] = heard

    def note_lost(self, worker_id: str, now: float) -> None:
        """Notes that the reader has waited for a reply of the worker in vain.

        From now on, the worker counts as lost until the engine finishes a step. An idle engine runs
        no steps, so the worker counts as lost for at most `_LOST_S` seconds.
        """
        if (heard := self._heard.get(worker_id)) is not None:
            heard.lost_at = now

    def silent_s(self, worker_id: str) -> float:
        """If the worker is silent, returns the seconds since the last write of its record.
        Otherwise returns 0."""
        heard = self._heard.get(worker_id)
        age_s = 0.0 if heard is None else self._now - heard.wrote_at
        return age_s if age_s > self._limit_s else 0.0

    def stuck_s(self, worker_id: str) -> float:
        """If the worker is stuck, returns the seconds since the engine last finished a step or had
        no work. Otherwise returns 0.
        """
        if (heard := self._heard.get(worker_id)) is None:
            return 0.0
        rates = heard.record.rates
        step_s = queue_seconds(rates, rates.step_tokens)
        age_s = self._now - heard.turned_at
        return age_s if age_s > max(self._limit_s, _TURNS_MAX * step_s) else 0.0

    def is_lost(self, worker_id: str, now: float) -> bool:
        """Returns True if the worker counts as lost, so that no request should wait for it."""
        heard = self._heard.get(worker_id)
        was_lost = heard is not None and now - heard.lost_at < _LOST_S
        return was_lost or bool(self.silent_s(worker_id) or self.stuck_s(worker_id))


def _has_work(record: WorkerRecord) -> bool:
    load = record.load
    return bool(load.step and (load.num_running or load.num_waiting or load.num_leases))
