"""A state machine that simulates the environment of one engine, with all calls in any order.

The environment has clients, peers that fill or read blocks, late reads that overwrite quarantined
blocks, and a prefix tree that follows the reported events. All results are compared with an oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.common.perf_model.soonest import Offer
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.types import FinalBlocks, Mode, Reserved, SequenceSpec, StepReport
from tandem.errors import NeverFits, QueueFull
from tests.engine_driver import make_engine, make_spec
from tests.kv_indexer import KvIndexer
from tests.toy_runner import continuation, kv_of

MAX_MODEL_LEN = 14
STEPS_MAX = 2000
CLIENTS_MAX = 4  # limit of concurrent clients; with more, most of a run would only fill the queue

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1)
offers = st.none() | st.builds(
    Offer, st.integers(0, 4), latency_s=st.just(0.1), block_s=st.sampled_from([0.0, 1.0, 5.0])
)
modes = st.sampled_from([Mode.LOCAL, Mode.WAITING_FOR_REMOTE_KV])


@dataclass
class Client:
    """The state of one sequence as known by a client of the engine."""

    spec: SequenceSpec
    expected: list[int]  # the complete completion by the oracle
    made: list[int]  # tokens of it that were reported so far
    num_cached_blocks: int | None = None  # cached blocks of a reserved sequence that awaits KV
    lent: list[int] | None = None  # PREFILL_ONLY: reported blocks from first_wanted_block on
    prefilled: bool = False

    @property
    def token_ids(self) -> list[int]:
        return self.spec.token_ids[: self.spec.num_prompt_tokens] + self.made


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 20),
        max_num_seqs=st.integers(1, 4),
        max_tokens_per_step=st.integers(1, 9),
        launches_ahead=st.booleans(),
    )
    def start(self, block_size: int, num_blocks: int, launches_ahead: bool, **limits: int) -> None:
        self.engine, self.runner = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            start_thread=self.start_thread,
            report_block_tokens=True,
            **limits,
            **self.settings(block_size),
        )
        self.runner.launches_ahead = launches_ahead
        self.engine._scheduler.early_reuse.clock = lambda: 1.0
        self.clients: dict[str, Client] = {}
        self.quarantined: set[int] = set()
        self.tree: dict[bytes, bytes] = {}  # block hash -> parent hash
        self.indexer = KvIndexer(block_size)
        self.num_added = 0

    def settings(self, block_size: int) -> dict[str, Any]:
        """Additional settings of the engine."""
        return {}

    def start_thread(self, name: str) -> JobThread:
        return IoThread(name)

    @precondition(lambda self: len(self.clients) < CLIENTS_MAX)
    @rule(
        prompt=prompts,
        num_output_tokens=st.integers(0, 3),
        mode=modes,
        max_tokens=st.integers(1, 8),
        stop=st.sets(st.integers(0, 15), max_size=2),
        remote_min=st.integers(0, 6),
        prefix_blocks=st.integers(0, 4),
        offer=offers,
        parent=st.integers(0, CLIENTS_MAX),
        is_batch=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        num_output_tokens: int,
        mode: Mode,
        max_tokens: int,
        stop: set[int],
        remote_min: int,
        prefix_blocks: int,
        offer: Offer | None,
        parent: int,
        is_batch: bool,
    ) -> None:
        room = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        expected = continuation(prompt, room, stop)
        made = expected[:num_output_tokens]
        spec = make_spec(
            self.new_id(),
            prompt + made,
            num_prompt_tokens=len(prompt),
            mode=mode,
            max_tokens=max_tokens,
            stop_token_ids=sorted(stop),
            remote_prefill_min_tokens=remote_min,
            prefix_blocks=prefix_blocks,
            offer=offer,
            fork_of=[*self.clients, "", "gone"][min(parent, len(self.clients) + 1)],
            is_batch=is_batch,
        )
        self._add(Client(spec, expected, made))

    @precondition(lambda self: len(self.clients) < CLIENTS_MAX)
    @rule(
        prompt=prompts,
        first_wanted=st.integers(0, 3),
        prefix_blocks=st.integers(0, 4),
        is_batch=st.booleans(),
    )
    def add_prefill_only(
        self, prompt: list[int], first_wanted: int, prefix_blocks: int, is_batch: bool
    ) -> None:
        spec = make_spec(
            self.new_id(),
            prompt,
            mode=Mode.PREFILL_ONLY,
            first_wanted_block=first_wanted,
            prefix_blocks=prefix_blocks,
            is_batch=is_batch,
        )
        self._add(Client(spec, continuation(prompt, 1), [], lent=[]))

    @precondition(lambda self: self.engine.has_work())
    @rule(steps_max=st.sampled_from([1, 1, 3, STEPS_MAX]), early=st.booleans())
    def step(self, steps_max: int, early: bool) -> None:
        for _ in range(steps_max):
            if not self.engine.has_work():
                return
            report = self.engine.step(self.take_early if early else None)
            assert not (early and report.final_blocks)
            self.take(report)
            self.blocks_are_whole()

    def take(self, report: StepReport) -> None:
        """Checks a report against the oracle."""
        for reserved in report.reserved:
            self.take_reserved(reserved)
        for run in report.final_blocks:
            self.take_run(run)
        for prefilled in report.prefilled:
            client = self.clients[prefilled.sequence_id]
            assert [prefilled.first_token_id] == client.expected
            client.prefilled = True
            num_blocks = len(self.engine.block_ids(prefilled.sequence_id))
            assert client.lent is not None
            assert len(client.lent) == max(0, num_blocks - client.spec.first_wanted_block)
        for new in report.new_tokens:
            client = self.clients[new.sequence_id]
            client.made += new.token_ids
            assert client.made == client.expected[: len(client.made)]
            if new.finish_reason:
                assert client.made == client.expected
                stopped = client.made[-1] in client.spec.sampling.stop_token_ids
                assert new.finish_reason == ("stop" if stopped else "length")
                del self.clients[new.sequence_id]
        for stored in report.stored:
            assert stored.block_hash not in self.tree
            self.tree[stored.block_hash] = stored.parent_hash
        for block_hash in report.removed:
            del self.tree[block_hash]
            assert block_hash not in self.tree.values(), "removed before its children"
        self.indexer.follow(report)
        assert self.indexer.positions.keys() == self.tree.keys()

    def take_reserved(self, reserved: Reserved) -> None:
        client = self.clients[reserved.sequence_id]
        table = self.engine.block_ids(reserved.sequence_id)
        client.num_cached_blocks = reserved.num_cached_tokens // self.engine.layout.block_size
        assert table[client.num_cached_blocks :] == reserved.block_ids
        self.runner.scribble(reserved.block_ids)

    def take_early(self, final_blocks: list[FinalBlocks]) -> None:
        for run in final_blocks:
            self.take_run(run)
        self.lent_blocks_keep_their_content()

    def take_run(self, run: FinalBlocks) -> None:
        client = self.clients[run.sequence_id]
        assert client.lent is not None
        assert run.first_block == client.spec.first_wanted_block + len(client.lent)
        client.lent += run.block_ids

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Continues a sequence that waits for external KV, in one of the ways that its mode
        allows."""
        client = data.draw(st.sampled_from(self._reserved()))
        ways = {
            Mode.WAITING_FOR_REMOTE_KV: [self.commit, self.start_local_prefill, self.restart],
            Mode.LOCAL: [self.continue_prefill, self.restart],
            Mode.PREFILL_ONLY: [self.continue_prefill],
        }
        data.draw(st.sampled_from(ways[client.spec.mode]))(data, client)

    def commit(self, data: st.DataObject, client: Client) -> None:
        assert client.num_cached_blocks is not None
        sequence_id = client.spec.sequence_id
        self.runner.fill(
            self.engine.block_ids(sequence_id), client.token_ids, client.num_cached_blocks
        )
        client.num_cached_blocks = None
        client.made.append(client.expected[len(client.made)])
        self.engine.commit(sequence_id, client.made[-1])

    def start_local_prefill(self, data: st.DataObject, client: Client) -> None:
        client.num_cached_blocks = None
        self.engine.start_local_prefill(client.spec.sequence_id)

    def continue_prefill(self, data: st.DataObject, client: Client) -> None:
        assert client.num_cached_blocks is not None
        sequence_id = client.spec.sequence_id
        table = self.engine.block_ids(sequence_id)
        num_blocks = data.draw(st.integers(client.num_cached_blocks, len(table)))
        came = client.token_ids[: num_blocks * self.engine.layout.block_size]
        self.runner.fill(table, came, client.num_cached_blocks)
        unsafe = self.draw_unsafe(data, table[num_blocks:])
        client.num_cached_blocks = None
        if len(unsafe) <= self.engine._kv.pools[0].num_available:
            self.engine.continue_prefill(sequence_id, num_blocks, unsafe)
        else:
            with pytest.raises(QueueFull):
                self.engine.continue_prefill(sequence_id, num_blocks, unsafe)
            del self.clients[sequence_id]

    def restart(self, data: st.DataObject, client: Client) -> None:
        unsafe = self._draw_unsafe_of(data, client)
        if data.draw(st.booleans()):  # True if the client already had the first token
            client.made.append(client.expected[len(client.made)])
        client.num_cached_blocks = None
        client.spec = make_spec(
            client.spec.sequence_id,
            client.token_ids,
            num_prompt_tokens=client.spec.num_prompt_tokens,
            mode=data.draw(modes),
            max_tokens=client.spec.sampling.max_tokens,
            stop_token_ids=client.spec.sampling.stop_token_ids,
            is_batch=client.spec.is_batch,
        )
        self.engine.restart(client.spec, unsafe)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(list(self.clients.values())))
        unsafe = self._draw_unsafe_of(data, client) if client.num_cached_blocks is not None else []
        del self.clients[client.spec.sequence_id]
        self.engine.remove(client.spec.sequence_id, unsafe)

    @rule()
    def reset_prefix_cache(self) -> None:
        before = self.engine.load()
        assert self.engine.reset_prefix_cache() == before.blocks_cached
        after = self.engine.load()
        assert (after.blocks_cached, after.blocks_used) == (0, before.blocks_used)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        safe = data.draw(st.sets(st.sampled_from(sorted(self.quarantined)), min_size=1))
        self.quarantined -= safe
        self.engine.unquarantine(safe)

    @invariant()
    def blocks_are_whole(self) -> None:
        self.engine.check_integrity()
        self.runner.scribble(sorted(self.quarantined))
        load = self.engine.load()
        assert load.blocks_quarantined == len(self.quarantined)
        stats = self.engine.stats()
        total = stats.blocks_free + load.blocks_used + load.blocks_cached + len(self.quarantined)
        assert total + stats.blocks_leaving == load.blocks_total

    @invariant()
    def lent_blocks_keep_their_content(self) -> None:
        for client in self.clients.values():
            if client.lent:
                first = client.spec.first_wanted_block
                table = self.engine.block_ids(client.spec.sequence_id)
                assert table[first : first + len(client.lent)] == client.lent
                start = client.spec.first_wanted_block * self.engine.layout.block_size
                wanted = kv_of(client.spec.token_ids)[start:]
                assert self.runner.read(client.lent, len(wanted)) == wanted[: self._span(client)]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.end_all()

    def end_all(self) -> None:
        """Lets peers answer, fences all reads, and checks that every sequence ends in bounded
        time."""
        self.engine.unquarantine(self.quarantined)
        self.quarantined.clear()
        for _ in range(STEPS_MAX):
            while self.engine.has_work():
                self.step(1, False)
            if self.run_threads():
                continue
            if not self.clients:
                break
            for client in list(self.clients.values()):
                if (num_cached_blocks := client.num_cached_blocks) is not None:
                    client.num_cached_blocks = None
                    if client.spec.mode is Mode.WAITING_FOR_REMOTE_KV:
                        self.engine.start_local_prefill(client.spec.sequence_id)
                    else:
                        self.engine.continue_prefill(client.spec.sequence_id, num_cached_blocks)
                elif client.prefilled:
                    del self.clients[client.spec.sequence_id]
                    self.engine.remove(client.spec.sequence_id)
        assert not self.clients, "somebody never ends"
        load = self.engine.load()
        assert load.blocks_cached == len(self.tree)
        assert self.engine.stats().blocks_free + load.blocks_cached == load.blocks_total
        assert (load.num_running, load.num_waiting, load.tokens_wasted) == (0, 0, 0)

    def run_threads(self) -> bool:
        """Runs the queued jobs of the engine's threads. Returns whether there was one."""
        return False

    def _add(self, client: Client) -> None:
        try:
            self.engine.add(client.spec)
        except NeverFits:
            capacity = self.engine.layout.num_blocks * self.engine.layout.block_size
            assert client.spec.num_prompt_tokens + client.spec.sampling.max_tokens > capacity
        else:
            self.clients[client.spec.sequence_id] = client

    def new_id(self) -> str:
        self.num_added += 1
        return str(self.num_added)

    def _reserved(self) -> list[Client]:
        return [c for c in self.clients.values() if c.num_cached_blocks is not None]

    def _draw_unsafe_of(self, data: st.DataObject, client: Client) -> list[int]:
        table = self.engine.block_ids(client.spec.sequence_id)
        return self.draw_unsafe(data, table[client.num_cached_blocks :])

    def draw_unsafe(self, data: st.DataObject, own: list[int]) -> list[int]:
        """Draws some of these blocks, and marks them as quarantined."""
        unsafe = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        self.quarantined |= set(unsafe)
        return unsafe

    def _span(self, client: Client) -> int:
        assert client.lent is not None
        return len(client.lent) * self.engine.layout.block_size
