"""NIXL alone between real processes, over shared memory and TCP: its agents and the fence.

What it does as every transport does is in test_transports.py.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from tandem.errors import TandemError
from tandem.transfer.nixl.agent import load_nixl
from tandem.transfer.reads import messages as transfer
from tandem.transfer.reads.messages import PeerRank
from tests.service.nixl_harness import Consumer, Peer, holds, transfer_config
from tests.service.transfer_pools import MODELS, NUM_BLOCKS, VARIABLE

pytestmark = pytest.mark.service

try:
    load_nixl()
except TandemError as error:
    pytest.skip(error.message, allow_module_level=True)

MakePeer = Callable[[str, int], Peer]
MakeConsumer = Callable[..., Consumer]
PATTERN = 7


@pytest.fixture(
    params=[MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:])],
    autouse=True,
)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model whose blocks all processes of the test move."""
    monkeypatch.setenv(VARIABLE, request.param)


@pytest.fixture(params=["memory", "tcp"])
def ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode of both agents: shared memory, or TCP, where the producer has to take part."""
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
def make_consumer() -> Iterator[MakeConsumer]:
    consumers: list[Consumer] = []

    def make(**config: object) -> Consumer:
        consumers.append(Consumer(transfer_config(**config)))
        return consumers[-1]

    yield make
    for consumer in consumers:
        consumer.thread.stop()


def test_a_slowed_pull_stays_under_way_and_can_be_cancelled(
    make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    consumer = make_consumer(delay_s=60.0)
    assert consumer.connect(peer) == ""
    consumer.submit("slow", peer, [1, 2], [3, 4])
    consumer.submit("late", peer, [1, 2], [5, 6], deadline_s=0.2)
    assert consumer.result("late").error == "the read did not end within 0.2 s"
    assert len(consumer.of_kind(transfer.Settled)) == 1
    consumer.thread.cancel("slow")
    assert consumer.result("slow").error == "the pull was cancelled"
    consumer.wait_unfenced([3, 4, 5, 6])


def test_a_producer_killed_fails_the_pull_and_leaves_other_peers_usable(
    ucx: str, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    doomed = make_peer("doomed", 1)
    other = make_peer("other", 2)
    consumer = make_consumer()
    assert consumer.connect(doomed) == ""
    assert consumer.connect(other) == ""
    doomed.kill()
    started = time.monotonic()
    consumer.submit("lost", doomed, list(range(64)), list(range(64)), deadline_s=5.0)
    assert not consumer.result("lost").done
    assert time.monotonic() - started < 6.0
    consumer.submit("meanwhile", other, [5], [100])
    assert consumer.result("meanwhile").done
    consumer.wait_unfenced(list(range(64)))
    consumer.submit("after", other, list(range(64)), list(range(64)))
    assert consumer.result("after").done
    assert np.array_equal(consumer.blocks[:64], other.contents[:64])
    consumer.submit("again", doomed, [1], [1], deadline_s=5.0)
    assert not consumer.result("again").done


def test_shared_memory_reads_a_stopped_producer_before_during_and_after(
    make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    consumer = make_consumer()
    blocks = list(range(NUM_BLOCKS))
    peer.pause()
    assert consumer.connect(peer) == ""
    consumer.submit("before", peer, blocks, blocks)
    assert consumer.result("before").done
    peer.resume()
    for number in range(5):
        consumer.blocks[:] = 0
        consumer.submit(f"during-{number}", peer, blocks, blocks)
        peer.pause()
        assert consumer.result(f"during-{number}").done
        assert np.array_equal(consumer.blocks, peer.contents)
        peer.resume()
    consumer.submit("after", peer, blocks, blocks)
    assert consumer.result("after").done
    assert consumer.unfenced() == []


def test_no_port_is_opened_by_either_side(make_peer: MakePeer, make_consumer: MakeConsumer) -> None:
    before = set(listeners(os.getpid()))
    peer = make_peer("peer", 1)
    consumer = make_consumer()
    assert consumer.connect(peer) == ""
    consumer.thread.producer(1)
    consumer.wait(lambda: bool(consumer.of_kind(transfer.ProducerReady)), "the producer")
    consumer.submit("read", peer, [1, 2], [1, 3])
    read = consumer.result("read")
    assert read.done
    assert read.num_blocks == 2
    assert 0 < read.post_s <= read.elapsed_s
    assert listeners(peer.process.pid) == []
    assert set(listeners(os.getpid())) <= before


def test_an_agent_leaves_the_code_of_the_c_library_alone() -> None:
    """Another thread may be in the middle of it."""
    program = """
import ctypes
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.ucx_mode import UcxMode

library = ctypes.CDLL(None)
functions = [ctypes.cast(getattr(library, n), ctypes.c_void_p).value for n in NAMES]
before = [ctypes.string_at(function, 16) for function in functions]
agent = NixlAgent("a", mode=UcxMode.MEMORY, progress_delay_us=None)
changed = [n for n, f, b in zip(NAMES, functions, before) if ctypes.string_at(f, 16) != b]
assert not changed, changed
"""
    names = ("mmap", "munmap", "mremap", "madvise", "brk", "sbrk", "shmat", "shmdt")
    subprocess.run([sys.executable, "-c", f"NAMES = {names}{program}"], check=True, timeout=60)


def listeners(pid: int) -> list[str]:
    """Addresses that a process accepts TCP connections at."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN]


def test_connecting_to_a_dead_peer_is_an_error(
    ucx: str, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    consumer = make_consumer(connect_deadline_s=3.0)
    peer.kill()
    assert consumer.connect(peer) != ""
    consumer.submit("never", peer, [1], [1])
    assert consumer.result("never").error == "the peer peer is not connected"


def test_connecting_to_a_stopped_peer_is_an_error_in_time(
    tcp: None, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    other = make_peer("b", 2)
    consumer = make_consumer(connect_deadline_s=3)
    peer.pause()
    consumer.thread.connect(peer.name, [PeerRank(peer.metadata, peer.pool)])
    assert consumer.connect(other) == ""  # not held up by the one that does not answer
    consumer.wait(
        lambda: len(consumer.of_kind(transfer.PeerConnected)) == 2, "the stopped one's error"
    )
    assert consumer.of_kind(transfer.PeerConnected)[1] == transfer.PeerConnected(
        "peer", "the read did not end within 3 s"
    )
    peer.resume()
    assert consumer.connect(peer) == ""


def test_metadata_that_is_none_is_an_error(
    make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    consumer = make_consumer()
    peer.metadata, good = b"not metadata", peer.metadata
    assert consumer.connect(peer) != ""
    peer.metadata = good
    assert consumer.connect(peer) == ""


def test_a_given_up_read_writes_nothing_once_its_blocks_are_unfenced(
    tcp: None, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    stopped = make_peer("stopped", 1)
    other = make_peer("other", 2)
    consumer = make_consumer()
    assert consumer.connect(stopped) == ""
    assert consumer.connect(other) == ""
    stopped.pause()
    blocks = list(range(64))
    consumer.submit("given up", stopped, blocks, blocks)
    consumer.submit("other", other, [1], [100])
    assert consumer.result("other").done  # so the first one's reads were started before
    consumer.thread.cancel("given up")
    assert consumer.result("given up").error == "the pull was cancelled"
    consumer.wait_unfenced(blocks)
    consumer.blocks[:64] = PATTERN
    stopped.resume()
    beats = itertools.count()

    def stays_while_the_consumer_works() -> bool:
        beat = f"beat-{next(beats)}"
        consumer.submit(beat, other, [1], [100])
        return consumer.result(beat).done and bool((consumer.blocks[:64] == PATTERN).all())

    assert holds(stays_while_the_consumer_works, during_s=0.5)
    consumer.submit("again", other, blocks, blocks)
    assert consumer.result("again").done
    assert np.array_equal(consumer.blocks[:64], other.contents[:64])


def test_a_read_that_ends_late_unfences_its_blocks_while_others_are_under_way(
    tcp: None, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    stopped = make_peer("stopped", 1)
    other = make_peer("other", 2)
    consumer = make_consumer(delay_s=60)
    assert consumer.connect(stopped) == ""
    assert consumer.connect(other) == ""
    consumer.submit("other", other, [1], [100])  # stays under way, so no renewal comes
    stopped.pause()
    blocks = list(range(64))
    consumer.submit("given up", stopped, blocks, blocks, deadline_s=1.0)
    assert not consumer.result("given up").done
    never_started = consumer.unfenced()
    fenced = sorted(set(blocks).difference(never_started))
    assert fenced, "no read was under way"
    stopped.resume()
    consumer.wait_unfenced(blocks)
    assert np.array_equal(consumer.blocks[fenced], stopped.contents[fenced])
    assert len(consumer.of_kind(transfer.Settled)) == 1


def test_past_the_budget_pulls_are_refused_until_the_consumer_is_made_anew(
    tcp: None, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    stopped, other = make_peer("stopped", 1), make_peer("other", 2)
    consumer = make_consumer(delay_s=1.5, quarantine_blocks_max=4)
    assert consumer.connect(stopped) == ""
    assert consumer.connect(other) == ""
    stopped.pause()
    consumer.submit("under way", other, [1, 2], [100, 101])
    blocks = list(range(16))
    consumer.submit("given up", stopped, blocks, blocks, deadline_s=0.1)
    assert not consumer.result("given up").done
    consumer.submit("refused", other, [1, 2], [110, 111])
    assert consumer.result("refused").error.startswith("new pulls are refused for a short")
    consumer.submit("into fenced", other, [1], [0])
    assert not consumer.result("into fenced").done
    assert consumer.result("under way").done  # the one that shares the consumer is not disturbed
    assert np.array_equal(consumer.blocks[[100, 101]], other.contents[[1, 2]])
    consumer.wait_unfenced([*blocks, 110, 111])
    consumer.submit("accepted", other, [1, 2], [0, 1])
    assert consumer.result("accepted").done


def test_a_restarted_peer_takes_the_place_of_the_old_one(
    ucx: str, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    old = make_peer("old", 1)
    consumer = make_consumer(delay_s=0.5)
    assert consumer.connect(old) == ""
    consumer.submit("cut off", old, [1], [1])
    consumer.thread.disconnect("old")
    assert consumer.result("cut off").error == "old was disconnected"
    old.kill()
    new = make_peer("new", 2)
    new.name = "old"
    assert consumer.connect(new) == ""
    consumer.submit("new", new, [1], [2])
    assert consumer.result("new").done
    assert np.array_equal(consumer.blocks[2], new.contents[1])


def test_an_idle_process_with_both_agents_burns_next_to_nothing(
    ucx: str, make_peer: MakePeer, make_consumer: MakeConsumer
) -> None:
    peer = make_peer("peer", 1)
    consumer = make_consumer()
    consumer.thread.producer(1)
    assert consumer.connect(peer) == ""
    consumer.wait(lambda: bool(consumer.of_kind(transfer.ProducerReady)), "the producer")
    consumer.submit("warm", peer, [1], [1])
    assert consumer.result("warm").done
    started = time.monotonic()
    cpu_started = time.process_time()
    time.sleep(3.0)
    used = (time.process_time() - cpu_started) / (time.monotonic() - started)
    print(f"{ucx}: idle at {used:.2%} of a core")
    assert used < 0.05
