"""Pulls between two real processes over NIXL, by shared memory and by TCP.

A source is killed or stopped before, during and after a read in both modes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from tandem.errors import TandemError
from tandem.transfer import thread as transfer
from tandem.transfer.nixl_agent import load_nixl
from tests.service.nixl_harness import LAYOUT, Peer, Reader, holds, transfer_config

pytestmark = pytest.mark.service

try:
    load_nixl()
except TandemError as error:
    pytest.skip(error.message, allow_module_level=True)

MakePeer = Callable[[str, int], Peer]
MakeReader = Callable[..., Reader]
PATTERN = 7


@pytest.fixture(params=["memory", "tcp"])
def ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode of both agents: shared memory, or TCP, where the source has to take part."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over shared memory even a stopped process can be read."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def make_peer() -> Iterator[MakePeer]:
    peers: list[Peer] = []

    def make(name: str, seed: int) -> Peer:
        peers.append(Peer(name, seed))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    readers: list[Reader] = []

    def make(**config: object) -> Reader:
        readers.append(Reader(transfer_config(**config)))
        return readers[-1]

    yield make
    for reader in readers:
        reader.thread.stop()


def test_scattered_blocks_come_exactly_where_they_belong(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, reader = make_peer("peer", 1), make_reader()
    assert reader.connect(peer) == ""
    rng = np.random.default_rng(2)
    source = rng.permutation(LAYOUT.num_blocks)[:64].tolist()
    local = rng.permutation(LAYOUT.num_blocks)[:64].tolist()
    best = 0.0
    for attempt in range(4):
        reader.blocks[:] = 0
        reader.submit(f"pull-{attempt}", peer, source, local)
        result = reader.result(f"pull-{attempt}")
        assert result.done, result.error
        assert result.num_bytes == 64 * LAYOUT.block_bytes
        assert np.array_equal(reader.blocks[local], peer.contents[source])
        others = np.setdiff1d(np.arange(LAYOUT.num_blocks), local)
        assert not reader.blocks[others].any()
        best = max(best, result.num_bytes / result.elapsed_s / 1e9)
    print(f"{ucx}: {best:.2f} GB/s for 64 scattered blocks of {LAYOUT.block_bytes} bytes")


def test_two_pulls_at_once_and_runs_that_adjoin(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    first, second, reader = make_peer("first", 1), make_peer("second", 2), make_reader()
    assert reader.connect(first) == ""
    assert reader.connect(second) == ""
    reader.submit("a", first, list(range(50)), list(range(10, 60)))
    reader.submit("b", second, list(range(64, 114)), list(range(60, 110)))
    assert reader.result("a").done
    assert reader.result("b").done
    assert np.array_equal(reader.blocks[10:60], first.contents[:50])
    assert np.array_equal(reader.blocks[60:110], second.contents[64:114])


def test_a_slowed_pull_stays_under_way_and_can_be_cancelled(
    make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, reader = make_peer("peer", 1), make_reader(delay_s=60.0)
    assert reader.connect(peer) == ""
    reader.submit("slow", peer, [1, 2], [3, 4])
    reader.submit("late", peer, [1, 2], [5, 6], deadline_s=0.2)
    assert reader.result("late").error == "not done in 0.2 s"
    assert len(reader.of_kind(transfer.Settled)) == 1
    reader.thread.cancel("slow")
    assert reader.result("slow").error == "the pull was cancelled"
    reader.wait_unfenced([3, 4, 5, 6])


def test_a_source_killed_fails_the_pull_and_leaves_other_peers_usable(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    doomed, other, reader = make_peer("doomed", 1), make_peer("other", 2), make_reader()
    assert reader.connect(doomed) == ""
    assert reader.connect(other) == ""
    doomed.kill()
    started = time.monotonic()
    reader.submit("lost", doomed, list(range(64)), list(range(64)), deadline_s=5.0)
    assert not reader.result("lost").done
    assert time.monotonic() - started < 6.0
    reader.submit("meanwhile", other, [5], [100])
    assert reader.result("meanwhile").done
    reader.wait_unfenced(list(range(64)))
    reader.submit("after", other, list(range(64)), list(range(64)))
    assert reader.result("after").done
    assert np.array_equal(reader.blocks[:64], other.contents[:64])
    reader.submit("again", doomed, [1], [1], deadline_s=5.0)
    assert not reader.result("again").done


@pytest.mark.parametrize("delay_s", [0.0, 1e-3, 4e-3, 8e-3])
def test_a_source_killed_during_a_read_leaves_exact_blocks_or_a_failure(
    delay_s: float, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    doomed, other, reader = make_peer("doomed", 1), make_peer("other", 2), make_reader()
    assert reader.connect(doomed) == ""
    assert reader.connect(other) == ""
    blocks = list(range(LAYOUT.num_blocks))  # several pieces, about 7 ms
    reader.submit("cut off", doomed, blocks, blocks, deadline_s=5.0)
    time.sleep(delay_s)  # the moment of the strike, not a wait
    doomed.process.kill()  # and not reaped yet
    result = reader.result("cut off")
    if result.done:
        assert np.array_equal(reader.blocks, doomed.contents)
    else:
        reader.wait_unfenced(blocks)
    reader.submit("gone", doomed, blocks[:8], blocks[:8], deadline_s=5.0)
    assert not reader.result("gone").done
    reader.wait(lambda: set(blocks[:8]) <= set(reader.unfenced()), "blocks unfenced")
    reader.submit("other", other, blocks, blocks)
    assert reader.result("other").done
    assert np.array_equal(reader.blocks, other.contents)


def test_shared_memory_reads_a_stopped_source_before_during_and_after(
    make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, reader = make_peer("peer", 1), make_reader()
    blocks = list(range(LAYOUT.num_blocks))
    peer.pause()
    assert reader.connect(peer) == ""
    reader.submit("before", peer, blocks, blocks)
    assert reader.result("before").done
    peer.resume()
    for number in range(5):
        reader.blocks[:] = 0
        reader.submit(f"during-{number}", peer, blocks, blocks)
        peer.pause()
        assert reader.result(f"during-{number}").done
        assert np.array_equal(reader.blocks, peer.contents)
        peer.resume()
    reader.submit("after", peer, blocks, blocks)
    assert reader.result("after").done
    assert reader.unfenced() == []


def test_no_port_is_opened_by_either_side(make_peer: MakePeer, make_reader: MakeReader) -> None:
    before = set(listeners(os.getpid()))
    peer, reader = make_peer("peer", 1), make_reader()
    assert reader.connect(peer) == ""
    reader.thread.source(1)
    reader.wait(lambda: bool(reader.of_kind(transfer.SourceReady)), "the source")
    reader.submit("read", peer, [1], [1])
    assert reader.result("read").done
    assert listeners(peer.process.pid) == []
    assert set(listeners(os.getpid())) <= before


def listeners(pid: int) -> list[str]:
    """Addresses that a process accepts TCP connections at."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]


def test_connecting_to_a_dead_peer_is_an_error(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, reader = make_peer("peer", 1), make_reader(connect_deadline_s=3.0)
    peer.kill()
    assert reader.connect(peer) != ""
    reader.submit("never", peer, [1], [1])
    assert reader.result("never").error == "the peer peer is not connected"


def test_connecting_to_a_stopped_peer_is_an_error_in_time(
    tcp: None, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, other, reader = make_peer("peer", 1), make_peer("b", 2), make_reader(connect_deadline_s=3)
    peer.pause()
    reader.thread.connect(peer.name, peer.metadata, peer.pool)
    assert reader.connect(other) == ""  # not held up by the one that does not answer
    reader.wait(lambda: len(reader.of_kind(transfer.PeerConnected)) == 2, "the stopped one's error")
    assert reader.of_kind(transfer.PeerConnected)[1] == transfer.PeerConnected(
        "peer", "not done in 3 s"
    )
    peer.resume()
    assert reader.connect(peer) == ""


def test_metadata_that_is_none_is_an_error(make_peer: MakePeer, make_reader: MakeReader) -> None:
    peer, reader = make_peer("peer", 1), make_reader()
    peer.metadata, good = b"not metadata", peer.metadata
    assert reader.connect(peer) != ""
    peer.metadata = good
    assert reader.connect(peer) == ""


def test_a_given_up_read_writes_nothing_once_its_blocks_are_unfenced(
    tcp: None, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    stopped, other, reader = make_peer("stopped", 1), make_peer("other", 2), make_reader()
    assert reader.connect(stopped) == ""
    assert reader.connect(other) == ""
    stopped.pause()
    blocks = list(range(64))
    reader.submit("given up", stopped, blocks, blocks)
    reader.submit("other", other, [1], [100])
    assert reader.result("other").done  # so the first one's reads were started before
    reader.thread.cancel("given up")
    assert reader.result("given up").error == "the pull was cancelled"
    reader.wait_unfenced(blocks)
    reader.blocks[:64] = PATTERN
    stopped.resume()
    beats = itertools.count()

    def stays_while_the_reader_works() -> bool:
        beat = f"beat-{next(beats)}"
        reader.submit(beat, other, [1], [100])
        return reader.result(beat).done and bool((reader.blocks[:64] == PATTERN).all())

    assert holds(stays_while_the_reader_works, during_s=0.5)
    reader.submit("again", other, blocks, blocks)
    assert reader.result("again").done
    assert np.array_equal(reader.blocks[:64], other.contents[:64])


def test_a_read_that_ends_late_unfences_its_blocks_while_others_are_under_way(
    tcp: None, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    stopped, other, reader = make_peer("stopped", 1), make_peer("other", 2), make_reader(delay_s=60)
    assert reader.connect(stopped) == ""
    assert reader.connect(other) == ""
    reader.submit("other", other, [1], [100])  # stays under way, so no renewal comes
    stopped.pause()
    blocks = list(range(64))
    reader.submit("given up", stopped, blocks, blocks, deadline_s=1.0)
    assert not reader.result("given up").done
    never_started = reader.unfenced()
    fenced = sorted(set(blocks).difference(never_started))
    assert fenced, "no read was under way"
    stopped.resume()
    reader.wait_unfenced(blocks)
    assert np.array_equal(reader.blocks[fenced], stopped.contents[fenced])
    assert len(reader.of_kind(transfer.Settled)) == 1


def test_past_the_budget_pulls_are_refused_until_the_reader_is_made_anew(
    tcp: None, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    stopped, other = make_peer("stopped", 1), make_peer("other", 2)
    reader = make_reader(delay_s=1.5, quarantine_blocks_max=4)
    assert reader.connect(stopped) == ""
    assert reader.connect(other) == ""
    stopped.pause()
    reader.submit("under way", other, [1, 2], [100, 101])
    blocks = list(range(16))
    reader.submit("given up", stopped, blocks, blocks, deadline_s=0.1)
    assert not reader.result("given up").done
    reader.submit("refused", other, [1, 2], [110, 111])
    assert reader.result("refused").error.startswith("too many blocks are fenced")
    reader.submit("into fenced", other, [1], [0])
    assert not reader.result("into fenced").done
    assert reader.result("under way").done  # the one that shares the reader is not disturbed
    assert np.array_equal(reader.blocks[[100, 101]], other.contents[[1, 2]])
    reader.wait_unfenced([*blocks, 110, 111])
    reader.submit("accepted", other, [1, 2], [0, 1])
    assert reader.result("accepted").done


def test_a_restarted_peer_takes_the_place_of_the_old_one(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    old, reader = make_peer("old", 1), make_reader(delay_s=0.5)
    assert reader.connect(old) == ""
    reader.submit("cut off", old, [1], [1])
    reader.thread.disconnect("old")
    assert reader.result("cut off").error == "old was disconnected"
    old.kill()
    new = make_peer("new", 2)
    new.name = "old"
    assert reader.connect(new) == ""
    reader.submit("new", new, [1], [2])
    assert reader.result("new").done
    assert np.array_equal(reader.blocks[2], new.contents[1])


def test_an_idle_process_with_both_agents_burns_next_to_nothing(
    ucx: str, make_peer: MakePeer, make_reader: MakeReader
) -> None:
    peer, reader = make_peer("peer", 1), make_reader()
    reader.thread.source(1)
    assert reader.connect(peer) == ""
    reader.wait(lambda: bool(reader.of_kind(transfer.SourceReady)), "the source")
    reader.submit("warm", peer, [1], [1])
    assert reader.result("warm").done
    started, cpu_started = time.monotonic(), time.process_time()
    time.sleep(3.0)
    used = (time.process_time() - cpu_started) / (time.monotonic() - started)
    print(f"{ucx}: idle at {used:.2%} of a core")
    assert used < 0.05
