"""The log of a batch: whatever routers do, each line has one result."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.net.files.folder import FolderStore
from tandem.router.batches.log import BatchLog, ClaimLost
from tandem.router.batches.records import LineError

PREFIX = "t/logs/b"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "files", "files-url")


async def both(log: BatchLog) -> tuple[bytes, bytes]:
    output = b"".join([piece async for piece in log.payloads("output")])
    return output, b"".join([piece async for piece in log.payloads("error")])


async def test_results_are_in_the_order_of_the_log(store: FolderStore) -> None:
    log = BatchLog(store, PREFIX)
    await log.append("claim", 1)
    await log.append("begin", 1, total=3)
    await log.append("results", 1, b"two\nbad\n", lines=[1, 2], num_failed=1, output_bytes=4)
    await log.append("results", 1, b"one\n", lines=[0], output_bytes=4)
    await log.append("close", 1, why="completed")
    other = BatchLog(store, PREFIX)
    progress = await other.refresh()
    assert (progress.done, progress.num_failed, progress.num_completed) == ({0, 1, 2}, 1, 2)
    assert progress.closed is not None
    assert await both(other) == await both(log) == (b"two\none\n", b"bad\n")
    with pytest.raises(ClaimLost):
        await log.append("cancel")


async def test_a_router_that_slept_writes_nothing(store: FolderStore) -> None:
    slow, fast = BatchLog(store, PREFIX), BatchLog(store, PREFIX)
    await slow.append("claim", 1)
    await slow.append("begin", 1, total=2)
    await fast.refresh()
    await fast.append("claim", 2)
    await fast.append("results", 2, b"new\n", lines=[0], output_bytes=4)
    with pytest.raises(ClaimLost):
        await slow.append("results", 1, b"old\n", lines=[0], output_bytes=4)
    assert await both(fast) == (b"new\n", b"")
    # Also after the batch has ended, when the payloads are gone.
    asleep = BatchLog(store, PREFIX)
    await fast.append("results", 2, b"x\n", lines=[1], output_bytes=2)
    await fast.append("close", 2, why="completed")
    await asleep.refresh()
    await fast.strip()
    with pytest.raises(ClaimLost):
        await both(asleep)


async def test_a_lower_term_cannot_claim(store: FolderStore) -> None:
    first = BatchLog(store, PREFIX)
    await first.append("claim", 5)
    with pytest.raises(ClaimLost):
        await BatchLog(store, PREFIX).append("claim", 4)


async def test_anyone_may_cancel(store: FolderStore) -> None:
    owner, other = BatchLog(store, PREFIX), BatchLog(store, PREFIX)
    await owner.append("claim", 3)
    await other.append("cancel")
    await owner.append("results", 3, b"a\n", lines=[0], output_bytes=2)
    assert owner.progress.cancelling_at == (await other.refresh()).cancelling_at > 0


async def test_a_long_header(store: FolderStore) -> None:
    errors = [LineError("code", "x" * 900, n) for n in range(20)]
    await BatchLog(store, PREFIX).append("close", 1, why="failed", errors=errors)
    closed = (await BatchLog(store, PREFIX).refresh()).closed
    assert closed is not None
    assert list(closed.errors) == errors


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["refresh", "claim", "result", "cancel"])),
        max_size=40,
    )
)
def test_no_line_has_two_results(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    """Three routers act in any order, each with what it knew when it last looked."""
    store = FolderStore(tmp_path_factory.mktemp("files") / "files", "files-url")

    async def act() -> None:
        logs = [BatchLog(store, PREFIX) for _ in range(3)]
        terms = [0, 0, 0]
        latest = 0
        written: list[int] = []
        for router, action in steps:
            log = logs[router]
            try:
                match action:
                    case "refresh":
                        await log.refresh()
                    case "claim":
                        latest += 1
                        terms[router] = latest
                        await log.append("claim", latest)
                    case "cancel":
                        await log.append("cancel")
                    case "result" if terms[router]:
                        line = len(log.progress.done)
                        await log.append(
                            "results",
                            terms[router],
                            f"{line}\n".encode(),
                            lines=[line],
                            output_bytes=len(f"{line}\n"),
                        )
                        written.append(line)
            except ClaimLost:
                terms[router] = 0
        found = BatchLog(store, PREFIX)
        await found.refresh()
        output, _ = await both(found)
        assert [int(line) for line in output.split()] == written
        assert written == sorted(set(written))

    asyncio.run(act())
