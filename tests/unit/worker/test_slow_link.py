from __future__ import annotations

import asyncio

from tandem.worker.peers.slow_link import SlowLink
from tests.harness.simulated_loop import SimulatedLoop


def test_bytes_of_all_pulls_come_one_after_the_other() -> None:
    loop = SimulatedLoop()
    link = SlowLink(100.0)
    pulls = [loop.create_task(link.carry(num_bytes, 0.0)) for num_bytes in (100, 200)]
    loop.settle()
    for now, ended in ((0.9, [False, False]), (1.1, [True, False]), (3.1, [True, True])):
        loop.advance(now - loop.time())
        assert [pull.done() for pull in pulls] == ended
    later = loop.create_task(link.carry(100, loop.time()))
    loop.advance(0.9)
    assert not later.done()  # the link was idle, which gives nothing
    loop.advance(0.2)
    assert later.done()
    loop.close()


def test_a_link_without_a_limit_is_as_fast_as_what_is_there() -> None:
    asyncio.run(SlowLink(0.0).carry(1 << 40, 0.0))
    assert SlowLink(0.0).seconds(1 << 40, 0.1) == 0.1
    assert (SlowLink(100.0).seconds(50, 0.1), SlowLink(100.0).seconds(50, 2.0)) == (0.5, 2.0)
