"""The sequences of the next step, their order and their numbers of tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tandem.common.perf_model.step_time import StepTimeModel, StepWork
from tandem.engine.adapter_slots import AdapterSlots
from tandem.engine.cache.kv_cache import KvCache
from tandem.engine.image_rows import ImageRows
from tandem.engine.scheduler.schedule import Schedule
from tandem.engine.scheduler.scheduler import LINES_STEPS_APART, Scheduler
from tandem.engine.sequence import Sequence, Status
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.types import Mode
from tests.engine_driver import make_spec, no_tiers
from tests.toy_runner import ToyRunner


class Bench:
    """A scheduler whose planned chunks count as computed, without a model."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        tokens: int = 16,
        itl_limit_s: float = 0.0,
    ) -> None:
        self.kv = KvCache(ToyRunner(block_size=4).layout(num_blocks))
        self.step_time = StepTimeModel(0.0)
        self.scheduler = Scheduler(
            self.kv,
            self.step_time,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=tokens,
            itl_limit_s=itl_limit_s,
            shared_wait_s=10.0,
            adapters=AdapterSlots(ToyRunner(block_size=4), num_slots=2, rank_max=8),
            tiers=no_tiers(self.kv.pools[0]),
            images=ImageRows(None),
            speculator=Speculator(None, self.step_time, 1000),
        )
        self.sequences: list[Sequence] = []

    def add(
        self,
        name: str,
        num_tokens: int,
        mode: Mode = Mode.LOCAL,
        *,
        is_batch: bool = False,
        first_token_by: float = 0.0,
    ) -> Sequence:
        salt = name.encode()
        tokens = list(range(num_tokens))
        sequence = Sequence.from_spec(
            make_spec(
                name,
                tokens,
                mode=mode,
                cache_salt=salt,
                is_batch=is_batch,
                first_token_by=first_token_by,
            ),
            arrival=len(self.sequences),
            block_size=4,
            chain_root=name.encode().ljust(16),
        )
        self.sequences.append(sequence)
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> list[tuple[str, int]]:
        schedule: Schedule = self.scheduler.schedule()
        planned = [(chunk.sequence.sequence_id, chunk.num_tokens) for chunk in schedule.chunks]
        for chunk in schedule.chunks:
            samples = chunk.samples
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            if samples and chunk.sequence.mode is not Mode.PREFILL_ONLY:
                chunk.sequence.append(0)
        self.scheduler.check_integrity(self.sequences)
        return planned


def test_decode_comes_first_and_prefill_takes_what_is_left_in_order() -> None:
    bench = Bench(tokens=16)
    bench.add("a", 3)
    assert bench.step() == [("a", 3)]
    bench.add("b", 20)
    bench.add("c", 10)
    assert bench.step() == [("a", 1), ("b", 15)]
    assert bench.step() == [("a", 1), ("b", 5), ("c", 10)]
    assert bench.step() == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize(
    ("step_s", "by", "planned"),
    [
        (0.005, math.inf, [("a", 20)]),  # b would delay a by 20 ms
        (0.005, 0.0, [("a", 20), ("b", 20), ("c", 20)]),  # nobody waits for the first tokens
        (0.050, math.inf, [("a", 20), ("b", 20), ("c", 20)]),  # a step is dear, as on a GPU
    ],
)
def test_prompts_with_deadlines_share_a_step_only_if_that_is_sooner(
    step_s: float, by: float, planned: list[tuple[str, int]]
) -> None:
    bench = Bench(tokens=100)
    for tokens in (10, 20, 40, 80):
        for _ in range(20):
            work = StepWork(prefill_tokens=tokens)
            bench.step_time.observe(work, step_s + tokens * 0.001)
    for name in "abc":
        bench.add(name, 20, first_token_by=by)
    assert bench.step() == planned
    assert "b" in [name for name, _ in bench.step()]


def test_a_step_has_at_most_max_num_seqs() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, 2)
    assert bench.step() == [("a", 2), ("b", 2)]
    assert bench.step() == [("a", 1), ("b", 1)]
    assert [s.sequence_id for s in bench.scheduler.waiting] == ["c"]


def test_who_awaits_kv_has_a_place_in_the_step_once_it_is_there() -> None:
    """Else a prompt that is computed here would wait for ever while KV of others keeps coming."""
    bench = Bench(max_num_seqs=4, num_blocks=1000)
    for number in range(4):
        bench.add(f"early {number}", 8, Mode.WAITING_FOR_REMOTE_KV)
    here = None
    for number in range(40):
        bench.add(f"late {number}", 8, Mode.WAITING_FOR_REMOTE_KV)
        bench.step()
        for sequence in list(bench.scheduler.awaiting):  # its KV came, and its first token
            sequence.num_computed_tokens = sequence.num_prefill_tokens = sequence.num_tokens
            sequence.append(0)
            bench.scheduler.start(sequence)
        here = here or bench.add("here", 8)
        assert len(bench.scheduler.running) <= 4
        if number > 3:  # one ends
            done = bench.scheduler.running[0]
            bench.scheduler.withdraw(done)
            bench.kv.release(done.release_tables())
            bench.sequences.remove(done)
    assert here is not None
    assert here.num_tokens > 8


def test_what_a_peer_waits_for_does_not_wait_for_what_peers_do() -> None:
    bench = Bench(max_num_seqs=2, num_blocks=100)
    for name in "ab":
        bench.add(name, 8, Mode.WAITING_FOR_REMOTE_KV)
    assert bench.step() == []
    assert [s.sequence_id for s in bench.scheduler.awaiting] == ["a", "b"]
    bench.add("p", 8, Mode.PREFILL_ONLY)
    bench.add("c", 8)
    assert bench.step() == [("p", 4)]
    assert bench.step() == [("p", 4)]
    assert [s.sequence_id for s in bench.scheduler.waiting] == ["c"]


def test_first_come_first_served_also_when_a_later_one_would_fit() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", 12)
    bench.add("b", 8)
    bench.add("c", 1)
    assert bench.step() == [("a", 12)]
    assert [s.sequence_id for s in bench.scheduler.waiting] == ["b", "c"]
    assert bench.scheduler.waiting[0].block_table == []


def test_the_last_chunk_for_a_peer_is_at_most_a_quarter_of_the_budget() -> None:
    bench = Bench(tokens=16)
    bench.add("a", 30, Mode.PREFILL_ONLY)
    assert [bench.step() for _ in range(3)] == [[("a", 16)], [("a", 10)], [("a", 4)]]
    bench = Bench(tokens=16)
    bench.add("b", 6, Mode.PREFILL_ONLY)
    assert [bench.step() for _ in range(2)] == [[("b", 3)], [("b", 3)]]


def test_the_youngest_is_preempted_and_waits_by_its_age() -> None:
    bench = Bench(num_blocks=5, tokens=32)
    a, b, c = (bench.add(name, n) for name, n in (("a", 8), ("b", 4), ("c", 7)))
    bench.step()
    assert (a.block_table, b.block_table, c.block_table) == ([0, 1], [2], [3, 4])
    assert bench.step() == [("a", 1), ("b", 1)]
    assert (a.block_table, b.block_table) == ([0, 1, 3], [2, 4])
    assert (c.status, c.num_preemptions, c.block_table) == (Status.WAITING, 1, [])
    d = bench.add("d", 1)
    assert bench.scheduler.waiting == [c, d]
    assert c.token_ids == [*range(7), 0]  # what it made is kept, and computed again


def test_nobody_takes_blocks_from_an_older_one() -> None:
    bench = Bench(num_blocks=3)
    a, b = bench.add("a", 7), bench.add("b", 4)
    bench.step()
    assert bench.step() == [("a", 1)]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert b.status is Status.WAITING


def test_a_sequence_for_a_peer_is_never_preempted() -> None:
    bench = Bench(num_blocks=5, tokens=8)
    a = bench.add("a", 7)
    bench.step()
    peer = bench.add("peer", 12, Mode.PREFILL_ONLY)
    assert bench.step() == [("a", 1), ("peer", 7)]
    assert bench.step() == [("peer", 3)]  # `a` lacks a block, and has nobody to take it from
    assert (a.num_preemptions, peer.num_preemptions) == (1, 0)


def test_has_no_work_while_the_oldest_cannot_be_admitted() -> None:
    bench = Bench(num_blocks=2)
    awaiting = bench.add("a", 8, Mode.WAITING_FOR_REMOTE_KV)
    bench.add("b", 1)
    bench.step()
    assert awaiting.status is Status.WAITING_FOR_KV
    assert not bench.scheduler.has_work()
    bench.scheduler.withdraw(awaiting)
    bench.sequences.remove(awaiting)
    bench.kv.release(awaiting.release_tables())
    assert bench.scheduler.has_work()


def test_sequences_wait_for_a_running_slot_and_those_for_a_peer_need_none() -> None:
    bench = Bench(itl_limit_s=0.1)
    bench.step_time.observe(StepWork(decode_tokens=2), 62.4e-3)
    assert bench.scheduler.num_running_slots == 2
    a = bench.add("a", 2)
    pulls = bench.add("pulls", 8, Mode.WAITING_FOR_REMOTE_KV)
    bench.add("b", 2)
    assert bench.step() == [("a", 2)]
    assert pulls.status is Status.WAITING_FOR_KV
    assert [s.sequence_id for s in bench.scheduler.waiting] == ["b"]
    bench.scheduler.withdraw(a)
    bench.sequences.remove(a)
    bench.kv.release(a.release_tables())
    assert bench.scheduler.has_work()
    assert bench.step() == [("b", 2)]
    peer = bench.add("peer", 2, Mode.PREFILL_ONLY)
    bench.step()
    assert peer.status is Status.RUNNING


def test_lines_of_batches_come_last_and_are_not_starved() -> None:
    bench = Bench(tokens=64, num_blocks=1000)
    bench.add("line", 40, is_batch=True)
    # A step of lines is short: 5 ms and 1 ms for each token are assumed.
    assert bench.step() == [("line", 32)]
    bench.add("b", 20)
    assert bench.step() == [("b", 20)]
    steps = [bench.step() for _ in range(3 * LINES_STEPS_APART)]
    assert all(("b", 1) in step for step in steps)
    with_line = [number for number, step in enumerate(steps) if len(step) > 1]
    assert [steps[number][1] for number in with_line[:2]] == [("line", 8), ("line", 1)]
    apart = {later - earlier for earlier, later in pairwise(with_line)}
    assert apart == {LINES_STEPS_APART + 1}


def test_lines_beside_many_others_are_decoded_in_each_step() -> None:
    bench = Bench(max_num_seqs=32, tokens=512, num_blocks=1000)
    for number in range(20):
        bench.add(f"{number}", 4)
    bench.add("line", 4, is_batch=True)
    for _ in range(LINES_STEPS_APART + 3):
        step = bench.step()
    # A step takes 10 ms and 1 ms for each sequence, so two lines would add less than 8%.
    assert step[-1] == ("line", 1)
    assert len(bench.step()) == 21


def test_lines_give_their_slots_and_blocks_to_others() -> None:
    bench = Bench(max_num_seqs=2, tokens=64)
    first, second = (bench.add(name, 8, is_batch=True) for name in ("first", "second"))
    bench.step()
    assert [s.status for s in (first, second)] == [Status.RUNNING] * 2
    bench.add("b", 8)
    assert bench.step() == [("b", 8)]
    assert [s.status for s in (first, second)] == [Status.RUNNING, Status.WAITING]
    bench.add("c", 8)
    assert bench.step() == [("b", 1), ("c", 8)]
    assert [s.status for s in (first, second)] == [Status.WAITING] * 2


def test_a_prompt_for_a_peer_stops_lines_only_while_it_is_computed() -> None:
    bench = Bench(tokens=64)
    bench.add("line", 4, is_batch=True)
    assert bench.step() == [("line", 4)]
    for_peer = bench.add("for peer", 20, Mode.PREFILL_ONLY)
    assert bench.step() == [("for peer", 10)]
    assert bench.step() == [("for peer", 10)]
    bench.scheduler.withdraw(for_peer)
    for_peer.status = Status.HELD
    assert bench.step() == [("line", 1)]
