"""What must hold in a simulated cluster at every moment, whatever the network and NIXL do."""

from __future__ import annotations

from collections.abc import Callable

from services.engine.sequence import Sequence, Status
from services.worker import messages
from services.worker.engine_process import _decoder
from tests.harness.simulated_cluster import Node, Stream
from tests.harness.simulated_nixl import SimulatedAgent, SimulatedFabric, SimulatedRead
from tests.toy_runner import kv_of


class TransferChecks:
    """Part of a test's machine, which makes the cluster; every check raises AssertionError."""

    fabric: SimulatedFabric
    agents: list[SimulatedAgent]
    readers: list[Node]
    sources: dict[str, Node]
    streams: list[Stream]

    def _check_cluster(self) -> None:
        for node in self._nodes():
            node.engine.check_integrity()
        self._no_read_writes_a_block_of_others()
        self._nothing_awaited_is_found_by_hash()
        self._sources_hold_what_is_leased()

    def _no_read_writes_a_block_of_others(self) -> None:
        for read, (node, owner, blocks) in self._targets():
            allowed = set(node.engine._pool._quarantined)
            if owner is not None and owner.status is Status.AWAITING_KV:
                allowed |= set(owner.block_table[owner.num_stored_blocks :])
            strangers = set(blocks) - allowed
            assert not strangers, f"{read} may still write blocks {strangers} of {node.worker_id}"

    def _nothing_awaited_is_found_by_hash(self) -> None:
        for node in self.readers:
            for sequence in node.engine._sequences.values():
                if sequence.status is Status.AWAITING_KV:
                    for block in sequence.block_table[sequence.num_stored_blocks :]:
                        assert node.engine._pool.is_writable(block), (
                            f"block {block} is hashed or shared before its lease was released"
                        )
                    stored = sequence.num_stored_blocks * sequence.block_size
                    wanted = kv_of(sequence.token_ids)[:stored]
                    found = node.runner.read(sequence.block_table, stored) if stored else []
                    assert found == wanted, "a block in the cache is not what its hash says"

    def _sources_hold_what_is_leased(self) -> None:
        for node in self.sources.values():
            held = set(node.engine._sequences)
            leased = {
                stream.start.lease_id
                for stream in self.streams
                if stream.start and stream.source is node and stream.is_open_at_source
            }
            waiting = [_decoder.decode(frames[0]) for frames in node.socket.received]
            leaving = {each.sequence_id for each in waiting if isinstance(each, messages.Remove)}
            assert held <= leased | leaving, "blocks are held for a stream that is closed"
        for stream in self.streams:
            if stream.lent and stream.is_open_at_source and not stream.source.is_dead:
                self._check_lent(stream)

    def _check_lent(self, stream: Stream) -> None:
        assert stream.start is not None
        engine, lease_id = stream.source.engine, stream.start.lease_id
        table = engine.block_ids(lease_id) if lease_id in engine._sequences else []
        first = stream.start.first_missing_block
        assert table[first : first + len(stream.lent)] == stream.lent, (
            "a source let go of blocks that its reader may still read"
        )
        size = engine.layout.block_size
        wanted = kv_of(list(stream.start.input.token_ids))[first * size :]
        wanted = wanted[: len(stream.lent) * size]
        assert stream.source.runner.read(stream.lent, len(wanted)) == wanted

    def _watch_commits(self, node: Node) -> None:
        commit = node.engine.commit

        def checked(sequence_id: str, first_token_id: int) -> None:
            request_id = sequence_id.rpartition("#")[0]
            streams = [s for s in self.streams if s.start and s.start.request_id == request_id]
            assert streams, "a commit without a lease"
            stream = streams[-1]
            released, start = stream.released, stream.start
            assert released is not None, "a commit before `released`"
            assert start is not None
            assert (released.epoch, released.lease_id) == (stream.source.epoch, start.lease_id)
            tokens = node.engine._sequences[sequence_id].token_ids
            found = node.runner.read(node.engine.block_ids(sequence_id), len(tokens))
            assert found == kv_of(tokens), "what is committed is not the prompt's KV"
            commit(sequence_id, first_token_id)

        node.engine.commit = checked  # type: ignore[method-assign]

    def _nodes(self) -> list[Node]:
        return [*self.readers, *self.sources.values()]

    def _reads(self) -> list[tuple[SimulatedAgent, SimulatedRead]]:
        return [(a, read) for a in self.agents for read in a.reads.values() if read.waiting]

    def _targets(self) -> list[tuple[SimulatedRead, tuple[Node, Sequence | None, list[int]]]]:
        """Each read that may still write, whose it was when it was first seen, and where."""
        found = []
        for agent, read in self._reads():
            node = next(n for n in self.readers if agent.name.startswith(f"{n.peer_id}-"))
            start, size = node.remote_pool.address, self.fabric.block_bytes
            blocks = [(local - start) // size for _, local in read.waiting]
            owner = read.owner
            if not read.is_seen:
                read.is_seen = True
                sequences = node.engine._sequences.values()
                owner = next((s for s in sequences if set(blocks) <= set(s.block_table)), None)
                read.owner = owner
            found.append((read, (node, owner, blocks)))
        return found

    def _wires(self) -> list[Callable[[], None]]:
        return [s.deliver_to_source for s in self.streams if s.to_source] + [
            s.deliver_to_reader for s in self.streams if s.to_reader
        ]
