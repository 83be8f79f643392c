"""One host leads at a time, and a head that has been superseded writes nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.processes.head_lease import HeadLease, fenced_set
from tandem.cluster.processes.owned import Owned, SharedOwned
from tandem.cluster.ray.scale_channel import ScaleChannel
from tandem.net.store.control_state import Head
from tests.harness.cluster import wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(Path(tmp_path_factory.mktemp("redis")), cluster_id="c") as running:
        yield running


@pytest.fixture
def redis(server: EmbeddedRedis) -> Iterator[Redis]:
    client = Redis.from_url(server.url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def url(server: EmbeddedRedis, redis: Redis) -> str:
    """The URL of the user whose rights a pool controller has."""
    return server.url_of("controller")


def test_one_host_leads_until_its_lease_ends(url: str, redis: Redis) -> None:
    a = HeadLease(url, "c", "a")
    b = HeadLease(url, "c", "b")
    assert a.read() is None
    assert a.take() == 1
    assert a.read() == Head(1, "a", "")
    assert b.take() is None
    assert a.renew(1, "10.0.0.1:8101")
    assert b.read() == Head(1, "a", "10.0.0.1:8101")
    assert 0 < redis.pttl("{tandem:c}:head") <= 8_000
    redis.delete("{tandem:c}:head")  # its time is over
    assert b.take() == 2
    assert not a.renew(1, "10.0.0.1:8101")
    assert b.read() == Head(2, "b", "")


def test_a_fresh_head_on_the_same_host_has_a_higher_number(url: str) -> None:
    lease = HeadLease(url, "c", "a")
    assert [lease.take(), lease.take()] == [1, 2]
    assert not lease.renew(1, "")


def test_a_redis_that_lost_all_learns_the_number_from_the_head(url: str, redis: Redis) -> None:
    lease = HeadLease(url, "c", "a")
    lease.take()
    lease.take()
    redis.flushall()
    assert lease.renew(2, "x:1")
    redis.delete("{tandem:c}:head")
    assert HeadLease(url, "c", "b").take() == 3


def test_an_old_number_writes_nothing(url: str, redis: Redis) -> None:
    lease = HeadLease(url, "c", "a")
    old = lease.take()
    new = lease.take()
    assert (old, new) == (1, 2)
    assert not fenced_set(redis, "c", old, {"pools": "old"})
    assert redis.get("{tandem:c}:pools") is None
    assert fenced_set(redis, "c", new, {"pools": "new"})
    assert redis.get("{tandem:c}:pools") == b"new"


def test_what_a_controller_owns_is_read_by_the_next_and_refused_from_the_one_before(
    url: str,
) -> None:
    lease = HeadLease(url, "c", "a")
    first = SharedOwned(url, "c", lease.take() or 0)
    assert first.read() is None
    assert first.write(Owned({"decode": 2}, [], 1))
    second = SharedOwned(url, "c", lease.take() or 0)
    assert second.read() == Owned({"decode": 2}, [], 1)
    assert not first.write(Owned({"decode": 9}, [], 1))
    assert second.read() == Owned({"decode": 2}, [], 1)


def test_a_channel_of_an_old_number_leaves_requests_to_the_next(url: str, redis: Redis) -> None:
    lease = HeadLease(url, "c", "a")
    taken: list[object] = []
    old = ScaleChannel(url, "c", taken.append, number=lease.take() or 0)
    old.start()
    wait_for(lambda: redis.info("clients")["blocked_clients"] == 1, deadline_s=5, what="its wait")
    new = ScaleChannel(url, "c", taken.append, number=lease.take() or 0)
    redis.lpush("{tandem:c}:scale", b'{"decode":2}')
    wait_for(lambda: old.is_superseded, deadline_s=5, what="its end")
    assert redis.lrange("{tandem:c}:scale", 0, -1) == [b'{"decode":2}']
    assert taken == []
    new.start()
    wait_for(lambda: taken == [{"decode": 2}], deadline_s=5, what="the request")
    new.supersede()


def test_a_request_that_was_taken_just_before_redis_failed_waits_for_it(
    url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(  # of the test before
        lambda: not redis.info("clients")["blocked_clients"], deadline_s=5, what="a channel's end"
    )
    taken: list[object] = []
    channel = ScaleChannel(url, "c", taken.append, number=HeadLease(url, "c", "a").take() or 0)
    write = channel._write
    errors = [ConnectionError("cut")]

    def write_or_fail() -> bool:
        if redis.get("requested") and not redis.llen("{tandem:c}:scale") and errors:
            raise errors.pop()
        return write()

    monkeypatch.setattr(channel, "_write", write_or_fail)
    redis.set("requested", 1)
    redis.lpush("{tandem:c}:scale", b'{"decode":2}')
    channel.start()
    wait_for(lambda: taken == [{"decode": 2}], deadline_s=5, what="the request")
    assert not errors
    assert not channel.is_superseded
    channel.supersede()
