"""Invariants of a simulated cluster that hold at every moment, whatever network and NIXL do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.common.block_hash import hash_blocks
from tandem.engine.cache.block_table import BlockTables
from tandem.engine.sequence import Sequence, Status
from tandem.transfer.grpc.reservations import PoolReservation
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.process import _decoder
from tests.grouped_toy import Windows, group_values
from tests.harness.simulated_cluster import Node
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric, SimulatedRead
from tests.harness.simulated_streams import Call, Fetch, Stream


class TransferChecks:
    """A mixin of the test's state machine. Every check raises AssertionError."""

    fabric: SimulatedFabric
    agents: list[SimulatedAgent]
    nodes: dict[str, Node]
    streams: list[Stream]
    fetches: list[Fetch]
    windows: Windows  # the window of each KV group
    kv_by_hash: dict[tuple[int, bytes], list[int]]  # (group, block hash) -> KV of such a block
    violations: list[str]  # recorded where an exception would count as a lost lease

    def _expect(self, node: Node, token_ids: list[int]) -> None:
        """Records the KV that a cache may contain for these tokens."""
        hashes = hash_blocks(node.chain_root, token_ids, node.engine.layout.block_size)
        for group in range(len(self.windows)):
            for block_hash, values in zip(
                hashes, self._kv_of(node, token_ids, group), strict=False
            ):
                self.kv_by_hash[group, block_hash] = values

    def _kv_of(self, node: Node, token_ids: Iterable[int], group: int) -> list[list[int]]:
        """The KV of the tokens' blocks in one group; the last block may be partial."""
        values = group_values(list(token_ids), self.windows[group])
        size = node.engine.layout.block_size
        return [values[at : at + size] for at in range(0, len(values), size)]

    def _check_cluster(self) -> None:
        assert not self.violations, self.violations
        for node in self.nodes.values():
            node.engine.check_integrity()
            self._caches_hold_what_their_hashes_say(node)
            self._nothing_awaited_is_found_by_hash(node)
            self._holds_what_is_leased(node)
        self._no_read_writes_a_block_of_others()
        for stream in self.streams:
            if stream.lent and stream.is_open_at_producer and not stream.producer.is_dead:
                self._check_lent(stream)

    def _caches_hold_what_their_hashes_say(self, node: Node) -> None:
        """Checks that cached blocks have the KV of their hashes, so that no wrong block is
        published, shared or lent."""
        for group, pool in enumerate(node.engine._kv.pools):
            found = node.runner.blocks(group, list(pool._by_hash.values()))
            for block_hash, values in zip(pool._by_hash, found, strict=True):
                assert values == self.kv_by_hash[group, block_hash], (
                    f"a block in the cache of {node.worker_id} is not what its hash says"
                )

    def _no_read_writes_a_block_of_others(self) -> None:
        for read, (node, owner, blocks) in self._targets():
            kv = node.engine._kv
            allowed = {
                first + block
                for first, pool in zip(kv.layout.first_ids, kv.pools, strict=True)
                for block in pool._quarantined
            }
            if owner is not None and owner.status is Status.WAITING_FOR_KV:
                allowed |= set(kv.global_ids(owner.tables, owner.num_stored_blocks))
            strangers = set(blocks) - allowed
            assert not strangers, f"{read} may still write blocks {strangers} of {node.worker_id}"

    def _nothing_awaited_is_found_by_hash(self, node: Node) -> None:
        for sequence in node.engine._sequences.values():
            if sequence.status is Status.WAITING_FOR_KV:
                for group, pool in enumerate(node.engine._kv.pools):
                    for block in sequence.tables.held(group, sequence.num_stored_blocks):
                        assert pool.is_writable(block), (
                            f"block {block} is hashed or shared before its lease was released"
                        )

    def _holds_what_is_leased(self, node: Node) -> None:
        held = {*node.engine._sequences, *node.engine._peer_blocks._chains}
        leased = {s.lease_id for s in self.streams if s.producer is node and s.is_open_at_producer}
        waiting = [_decoder.decode(frames[0]) for frames in node.socket.received]
        leaving = {each.sequence_id for each in waiting if isinstance(each, messages.Remove)}
        own = {sequence.sequence_id for sequence in node.decode._sequences}
        assert held <= leased | leaving | own, "blocks are held for a stream that is closed"

    def _check_lent(self, stream: Stream) -> None:
        node = stream.producer
        lease_id = stream.lease_id
        opening = stream.opening
        engine = node.engine
        assert opening is not None
        tables = BlockTables()
        if lease_id in engine._sequences:
            tables = engine._sequences[lease_id].tables
        elif lease_id in engine._peer_blocks:
            tables = engine._peer_blocks._chains[lease_id].tables
        places = self._places_in_transfer(stream)[: len(stream.lent)]
        starts = engine.layout.first_ids
        own = [starts[g] + tables.ids[g][index] for g, index in places if tables]
        assert own == stream.lent, "a producer let go of blocks that its consumer may still read"
        for group, index in places:
            if stream.start is not None:
                wanted = self._kv_of(node, stream.start.input.token_ids, group)[index]
            else:
                assert stream.hold is not None
                wanted = self.kv_by_hash[group, stream.hold.block_hashes[index]]
            found = node.runner.blocks(group, [tables.ids[group][index]])[0]
            assert found[: len(wanted)] == wanted, "what is lent is not the prompt's KV"

    def _places_in_transfer(self, stream: Stream) -> list[tuple[int, int]]:
        """Groups and indices of the blocks that the consumer wants, in order."""
        opening = stream.opening
        layout = stream.producer.engine.layout
        if stream.start is not None:
            num_tokens = len(stream.start.input.token_ids)
            end = layout.blocks_of(num_tokens)
            depth = (num_tokens - 1) // layout.block_size
        else:
            assert stream.hold is not None
            end = depth = len(stream.hold.block_hashes)
        assert opening is not None
        return [
            (number, index)
            for index in range(opening.first_missing_block, end)
            for number, group in enumerate(layout.groups)
            if index >= group.first_seen(depth * layout.block_size)
        ]

    def _holds_kv_of(self, node: Node, tables: BlockTables, token_ids: list[int]) -> bool:
        """Says whether the tables have the KV of these tokens, as far as they have blocks."""
        for group in range(len(self.windows)):
            first = tables.firsts[group]
            wanted = self._kv_of(node, token_ids, group)
            found = node.runner.blocks(group, tables.ids[group][first : len(wanted)])
            for values, kv in zip(found, wanted[first:], strict=True):
                if values[: len(kv)] != kv:
                    return False
        return True

    def _watch_trust(self, node: Node) -> None:
        """Wraps the calls that make pulled KV usable, and checks that `released` preceded them and
        the KV is correct."""
        self._watch_commits(node)
        self._watch_prefixes(node)
        self._watch_bytes(node)

    def _watch_commits(self, node: Node) -> None:
        commit = node.engine.commit

        def checked(sequence_id: str, first_token_id: int, block_sums: list[float]) -> None:
            request_id = sequence_id.rpartition("#")[0]
            streams = [s for s in self.streams if s.start and s.start.request_id == request_id]
            assert streams, "a commit without a lease"
            assert streams[-1].is_whole, "a commit before `released`"
            sequence = node.engine._sequences[sequence_id]
            assert self._holds_kv_of(node, sequence.tables, sequence.token_ids), (
                "what is committed is not the prompt's KV"
            )
            commit(sequence_id, first_token_id, block_sums)

        node.engine.commit = checked  # type: ignore[method-assign]

    def _watch_prefixes(self, node: Node) -> None:
        continue_prefill = node.engine.continue_prefill

        def checked(sequence_id: str, num_blocks: int, unsafe: list[int]) -> None:
            sequence = node.engine._sequences.get(sequence_id)
            if sequence is not None and num_blocks > sequence.num_stored_blocks:
                hashes = sequence.reusable_hashes[:num_blocks]
                holds = [
                    s
                    for s in self.streams
                    if s.hold
                    and s.consumer is node
                    and list(s.hold.block_hashes)[:num_blocks] == hashes
                ]
                assert any(s.is_whole for s in holds), "a prefix is trusted before `released`"
                tokens = sequence.token_ids[: num_blocks * sequence.block_size]
                assert self._holds_kv_of(node, sequence.tables, tokens), (
                    "what is trusted is not the prompt's KV"
                )
            continue_prefill(sequence_id, num_blocks, unsafe)

        node.engine.continue_prefill = checked  # type: ignore[method-assign]

    def _watch_bytes(self, node: Node) -> None:
        write = node.link.pool.write

        def checked(into: PoolReservation, first: int, data: memoryview) -> None:
            waiting = [_decoder.decode(frames[0]) for frames in node.socket.received]
            ends = [each for each in waiting if isinstance(each, messages.ENDS_OF_PULLS)]
            is_reported = into.sequence_id in map(messages.sequence_id, ends)
            own = node.engine._sequences.get(into.sequence_id)
            awaiting = own is not None and own.status is Status.WAITING_FOR_KV
            mine = (
                set(node.engine._kv.global_ids(own.tables, own.num_stored_blocks))
                if own and awaiting
                else set()
            )
            open_ids = {s.lease_id for s in self.streams if s.is_open_at_consumer}
            live = any(f.consumer is node and f.lease_id in open_ids for f in self.fetches)
            may = live and not is_reported and mine.issuperset(into.block_ids)
            if not may:
                self.violations.append("bytes of gRPC are written for a lease that is over")
            write(into, first, data)

        node.link.pool.write = checked  # type: ignore[method-assign]

    def _reads(self) -> list[tuple[SimulatedAgent, SimulatedRead]]:
        return [(a, read) for a in self.agents for read in a.reads.values() if read.waiting]

    def _targets(self) -> list[tuple[SimulatedRead, tuple[Node, Sequence | None, list[int]]]]:
        """Each read that may still write, its owner when it was first seen, and its targets."""
        found = []
        for agent, read in self._reads():
            nodes = self.nodes.values()
            node = next(n for n in nodes if agent.name.startswith(f"{n.peer_id}-"))
            blocks = [copy.block_id for copy in read.waiting]
            owner = read.owner
            if not read.is_seen:
                read.is_seen = True
                sequences = node.engine._sequences.values()
                ids = node.engine._kv.global_ids
                wanted = set(blocks)
                owner = next((s for s in sequences if wanted <= set(ids(s.tables))), None)
                read.owner = owner
            found.append((read, (node, owner, blocks)))
        return found

    @property
    def _calls(self) -> list[Call]:
        return [*self.streams, *self.fetches]

    def _wires(self) -> list[Callable[[], None]]:
        return [wire for call in self._calls for wire in call.wires]
