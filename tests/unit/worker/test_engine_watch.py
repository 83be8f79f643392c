"""The number of turns after which an engine counts as hung, and as stuck."""

from __future__ import annotations

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.worker_load import WorkerLoad
from tandem.worker.engine_process.watch import TURN_S, EngineWatch

NUM_TURNS = 10  # that an engine may be silent
CONFIG = WorkerConfig(
    role="decode",
    cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
    engine=EngineConfig(model="m"),
    transfer=TransferConfig(quarantine_blocks_max=8),
    worker_id="w",
    engine_hang_timeout_s=NUM_TURNS * TURN_S,
)


class Watched:
    """Stands in for the link and the worker of a watch, and records its actions."""

    def __init__(self) -> None:
        self.num_reports = 0
        self.is_awaited = self.is_used = False
        self.load = WorkerLoad()
        self.killed: list[str] = []
        self.num_stacks = 0
        self.gave_up: list[str] = []
        self._watch = EngineWatch(
            CONFIG,
            self,  # type: ignore[arg-type]
            lambda: self.load,
            is_used=lambda: self.is_used,
            give_up=self.gave_up.append,
        )

    def tell_stacks(self) -> None:
        self.num_stacks += 1

    def kill(self, reason: str) -> None:
        self.killed.append(reason)

    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self._watch.turn()


def test_an_engine_is_ended_when_somebody_waits_for_it_in_vain() -> None:
    for waits in ("is_awaited", "is_used"):
        watched = Watched()
        watched.turn(3 * NUM_TURNS)
        setattr(watched, waits, True)
        watched.turn(NUM_TURNS - 1)
        assert watched.num_stacks == 0
        watched.turn(1)
        assert (watched.num_stacks, watched.killed) == (1, [])
        watched.turn(1)
        assert (watched.num_stacks, watched.killed) == (1, ["the engine made no progress for 11 s"])


def test_a_report_and_nobody_who_waits_both_begin_the_count_anew() -> None:
    watched = Watched()
    watched.is_used = True
    watched.turn(NUM_TURNS)
    watched.num_reports += 1
    watched.turn(1 + NUM_TURNS)
    watched.is_used = False
    watched.turn(1)
    watched.is_used = True
    watched.turn(NUM_TURNS)
    assert watched.killed == []


def test_a_quarantine_that_stays_past_its_budget_is_given_up() -> None:
    watched = Watched()
    watched.load = WorkerLoad(blocks_quarantined=8)
    watched.turn(3 * NUM_TURNS)
    watched.load = WorkerLoad(blocks_quarantined=9)
    watched.turn(NUM_TURNS)
    assert watched.gave_up == []
    watched.turn(1)
    assert watched.gave_up == [
        "for 11 s, more than 8 KV blocks have been in quarantine, because abandoned reads may "
        "still write them"
    ]
    assert watched.killed == []
