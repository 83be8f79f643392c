"""The KV pool's memory: shared with another process, and there before the first step needs it."""

from __future__ import annotations

import ctypes
import os

import pytest

from tandem.engine.cache.layout.pool_memory import create_shared, map_shared, populate, size_shared

SIZE = 9 << 20  # two whole turns of `populate` and a part of one


@pytest.fixture
def pool_fd() -> int:
    fd = create_shared()
    assert fd is not None
    return fd


def test_what_one_mapping_writes_the_other_reads(pool_fd: int) -> None:
    other = os.dup(pool_fd)
    pages = size_shared(pool_fd, SIZE)
    pages[123:126] = b"abc"
    assert map_shared(other, SIZE)[123:126] == b"abc"


def test_populated_pages_are_there_and_keep_what_was_written(pool_fd: int) -> None:
    kept = os.dup(pool_fd)
    pages = size_shared(pool_fd, SIZE)
    assert os.fstat(kept).st_blocks == 0
    pages[5000:5003] = b"abc"
    populate(ctypes.addressof(ctypes.c_char.from_buffer(pages)), SIZE).join()
    assert os.fstat(kept).st_blocks * 512 == SIZE
    assert pages[5000:5003] == b"abc"
    os.close(kept)
