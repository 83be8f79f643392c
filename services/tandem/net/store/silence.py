"""Measures how long workers have been silent, for one reader of their records. Pure.

A live worker numbers each write of its record. If the number does not change, the process is
stopped, cut off or gone, long before its record expires. An engine that has work and makes no turn
hangs, even if its worker still writes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.predict import queue_seconds
from tandem.net.store.registry import WorkerRecord

_WRITES_MAX = 3  # writes that may be missed
_TURNS_MAX = 3  # full steps, by the measured rates
_LOST_S = 30.0


@dataclass(slots=True)
class _Heard:
    """The last state of a process. Times are the reader's monotonic seconds."""

    record: WorkerRecord
    wrote_at: float
    turned_at: float
    lost_at: float = -math.inf  # a lease was lost on it, and its engine has made no turn since


class Silences:
    """The silence of all workers at the last records. The reader notes each set that it reads.

    While Redis is away nothing is read, so no worker becomes more silent.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._limit_s = _WRITES_MAX * cluster.record_interval_s
        self._heard: dict[str, _Heard] = {}
        self._now = 0.0

    def note(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Takes all records that were read at this time."""
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
        """Records that this reader waited for the worker in vain.

        The worker counts as lost until its engine makes a turn, but at most for `_LOST_S`, because
        an idle engine makes none.
        """
        if (heard := self._heard.get(worker_id)) is not None:
            heard.lost_at = now

    def silent_s(self, worker_id: str) -> float:
        """Returns the seconds since a worker last wrote; 0 while it may still be on time."""
        heard = self._heard.get(worker_id)
        age_s = 0.0 if heard is None else self._now - heard.wrote_at
        return age_s if age_s > self._limit_s else 0.0

    def stuck_s(self, worker_id: str) -> float:
        """Returns the seconds since an engine with work last made a turn; 0 within a step's
        duration.
        """
        if (heard := self._heard.get(worker_id)) is None:
            return 0.0
        rates = heard.record.rates
        step_s = queue_seconds(rates, rates.step_tokens) if rates.measured else 0.0
        age_s = self._now - heard.turned_at
        return age_s if age_s > max(self._limit_s, _TURNS_MAX * step_s) else 0.0

    def is_lost(self, worker_id: str, now: float) -> bool:
        """Returns whether no request should wait for this worker now."""
        heard = self._heard.get(worker_id)
        was_lost = heard is not None and now - heard.lost_at < _LOST_S
        return was_lost or bool(self.silent_s(worker_id) or self.stuck_s(worker_id))


def _has_work(record: WorkerRecord) -> bool:
    load = record.load
    return bool(load.step and (load.num_running or load.num_waiting or load.num_leases))
