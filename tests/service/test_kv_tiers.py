"""Real engine processes with a tier on disk, some with an object store below it, and their faults.

kill         SIGKILL amid requests; the next process takes the folder
flip bits    the same, and bits of 1% of the folder's blocks are flipped before it starts
fill disk    files of both processes grow no more (RLIMIT_FSIZE), and then they may again
other model  a process with another model takes the folder for a while, and clears it
hang store   the store's server answers nobody until the round is over
kill store   SIGKILL of the server, which starts without its objects when the round is over
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from tandem.engine.tiers.disk.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.types import TierStats
from tandem.worker.engine_process.program import ENGINE_MODULE
from tests.harness.tiered_process import DEADLINE_S, PROMPTS, Process
from tests.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from tests.harness.object_store import ObjectStoreServer

pytestmark = pytest.mark.service

CHATS, TURNS = 20, 4  # prompts of several turns: each begins with the one before
SLOTS = 100  # of a tier, for the 140 blocks of all chats
FULL_BYTES = 1 << 17  # of a file on a full disk
AT_ONCE = 6
POLICIES = "lru", "value"  # of the two processes
STAGED_ENGINE = "tests.harness.staged_engine"  # a device's copies, as late as they may be
_answers: dict[str, list[list[int]]] = {}  # of a process without a tier, by family


@pytest.mark.parametrize(
    ("family", "engine_module"),
    [
        # In CI test_no_fault_changes_a_token kills these.
        *(
            pytest.param(each, ENGINE_MODULE, marks=pytest.mark.slow)
            for each in ("llama", "gemma3")
        ),
        ("gemma3", STAGED_ENGINE),
    ],
)
async def test_a_killed_engines_blocks_are_found_by_the_next(
    family: str, engine_module: str, tmp_path: Path
) -> None:
    model, folder = tmp_path / "model", tmp_path / "kv"
    make_tiny_model(family, model)
    async with asyncio.timeout(DEADLINE_S):
        if family not in _answers:
            plain = Process(str(model), None)
            await plain.start()
            _answers[family] = [(await plain.answer(str(n), p))[0] for n, p in enumerate(PROMPTS)]
            await plain.stop()
        expected = _answers[family]
        first = Process(str(model), folder, engine_module=engine_module)
        await first.start()
        for number, prompt in enumerate(PROMPTS):
            assert (await first.answer(str(number), prompt))[0] == expected[number]
        await first.wait_for_writes(20)
        await first.kill()
        second = Process(str(model), folder, engine_module=engine_module)
        await second.start()
        found = [await second.answer(str(n), p) for n, p in enumerate(PROMPTS)]
        await second.check_idle()
        await second.stop()
    assert [tokens for tokens, _ in found] == expected
    assert sum(num_cached for _, num_cached in found) > 0  # how many depends on measured rates


@dataclass
class Counts:
    """Sums over the processes of a struggle, for one tier."""

    loaded: int = 0
    bad: int = 0
    failed_writes: int = 0

    def take(self, tier: TierStats) -> None:
        self.loaded += tier.blocks_loaded
        self.bad += tier.blocks_bad
        self.failed_writes += tier.write_failures


class Struggle:
    """Two processes on one folder, with a store below it, the requests of chats, and what is done
    to the processes and to the store."""

    def __init__(self, model: str, other: str, folder: Path, server: ObjectStoreServer) -> None:
        self.model, self.other, self.folder, self.server = model, other, folder, server
        self.rng = Random(0)
        self.num_asked = 0
        self.counts: defaultdict[str, Counts] = defaultdict(Counts)  # by tier

    async def start(self) -> None:
        """Learns the right answers from processes without a tier."""
        whole = [[self.rng.randrange(2, 200) for _ in range(100)] for _ in range(CHATS)]
        self.prompts = [chat[: 25 * turn + 20] for chat in whole for turn in range(TURNS)]
        self.expected = {}
        for model in (self.model, self.other):
            plain = Process(model, None)
            await plain.start()
            prompts = self.prompts if model == self.model else self.prompts[:TURNS]
            answers = [await plain.answer(str(n), p) for n, p in enumerate(prompts)]
            self.expected[model] = [tokens for tokens, _ in answers]
            await plain.stop()
            if model == self.model:
                self.sizes = plain.sizes
        self.processes: list[Process | None] = [None, None]
        self.is_up = asyncio.Event()
        for number in range(2):
            await self.bring_up(number)

    async def make(self, model: str, policy: str) -> Process:
        disk_bytes = sum(HEADER_BYTES + SLOTS * (size + RECORD_BYTES) for size in self.sizes)
        process = Process(
            model, self.folder, disk_bytes=disk_bytes, kv_tier_policy=policy, **self.server.settings
        )
        await process.start()
        return process

    async def bring_up(self, number: int) -> None:
        self.processes[number] = await self.make(self.model, POLICIES[number])
        self.is_up.set()

    async def take_down(self, number: int) -> None:
        """Kills a process; requests go to the other one, if it is up."""
        process = self.processes[number]
        assert process is not None
        self.processes[number] = None
        self.is_up.clear()
        self.take_counters(process)
        await process.kill()

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process is not None]

    async def ask(self, count: int) -> None:
        """Asks prompts of chats; one whose process is killed is asked again, as a router does."""
        for _ in range(count):
            number = self.rng.randrange(len(self.prompts))
            while True:
                while not self.living:
                    await self.is_up.wait()
                self.num_asked += 1
                process = self.rng.choice(self.living)
                name = str(self.num_asked)
                try:
                    tokens, _ = await process.answer(name, self.prompts[number])
                except ConnectionError:
                    continue
                assert tokens == self.expected[self.model][number]
                break

    async def round(self, number: int, count: int) -> None:
        """Asks `count` prompts while one deed is done."""
        deeds = (
            *(self.kill, self.flip_bits, self.fill_disk, self.empty_disk, self.change_model),
            *(self.hang_store, self.kill_store),
        )
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self.ask(-(-count // AT_ONCE)))
            await deeds[number % len(deeds)](number // len(deeds) % 2)
        await asyncio.to_thread(self.server.bring_back)
        for process in self.living:
            await process.check_idle()

    async def kill(self, number: int) -> None:
        await self.take_down(number)
        await self.bring_up(number)

    async def flip_bits(self, number: int) -> None:
        for each in range(2):
            await self.take_down(each)
        for path in self.folder.glob("*/blocks*"):
            group = int(path.name.removeprefix("blocks").removeprefix("-") or 0)
            data = path.read_bytes()
            size = self.sizes[group]
            starts = [at for at in range(0, len(data), size) if any(data[at : at + size])]
            with path.open("r+b", buffering=0) as file:
                for start in self.rng.sample(starts, k=-(-len(starts) // 100)):
                    # Not a hole, where a write cut short left one: a full disk takes no byte there.
                    at = self.rng.choice([i for i in range(start, start + size) if data[i]])
                    file.seek(at)
                    file.write(bytes([data[at] ^ 1]))
        for each in range(2):
            await self.bring_up(each)

    async def fill_disk(self, number: int) -> None:
        for process in self.living:
            process.limit_files(FULL_BYTES)

    async def empty_disk(self, number: int) -> None:
        for process in self.living:
            process.limit_files(resource.RLIM_INFINITY)

    async def change_model(self, number: int) -> None:
        await self.take_down(number)
        other = await self.make(self.other, POLICIES[number])
        for turn in range(TURNS):
            tokens, _ = await other.answer(str(turn), self.prompts[turn])
            assert tokens == self.expected[self.other][turn]
        await other.stop()
        await self.bring_up(number)

    async def hang_store(self, number: int) -> None:
        self.server.stop()

    async def kill_store(self, number: int) -> None:
        self.server.kill()

    def take_counters(self, process: Process) -> None:
        for tier in process.stats.tiers:
            self.counts[tier.name].take(tier)

    async def stop(self) -> None:
        for process in self.living:
            self.take_counters(process)
            await process.stop()


async def struggle(
    model: str,
    other: str,
    folder: Path,
    num_rounds: int,
    count: int,
    server: ObjectStoreServer,
) -> dict[str, Counts]:
    """Returns what happened to each tier when `count` requests were asked in each round."""
    found = Struggle(model, other, folder, server)
    await found.start()
    for number in range(num_rounds):
        await found.round(number, count)
    await found.stop()
    assert found.num_asked >= num_rounds * count
    assert all(tier.failed_writes > 0 for tier in found.counts.values()), found.counts
    return found.counts


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MB."""
    folder = tmp_path / "kv"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk of 1 MB cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
async def test_no_fault_changes_a_token(
    family: str, tmp_path: Path, server: ObjectStoreServer
) -> None:
    make_tiny_model(family, tmp_path / "model")
    make_tiny_model("qwen3", tmp_path / "other")
    models = str(tmp_path / "model"), str(tmp_path / "other")
    async with asyncio.timeout(DEADLINE_S):
        found = await struggle(*models, tmp_path / "kv", 7, 30, server)
    assert found.keys() == {"disk", "store"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_no_fault_changes_a_token_of_10_000_requests(
    family: str, tmp_path: Path, small_disk: Path, server: ObjectStoreServer
) -> None:
    make_tiny_model(family, tmp_path / "model")
    make_tiny_model("qwen3", tmp_path / "other")
    models = str(tmp_path / "model"), str(tmp_path / "other")
    found = await struggle(*models, small_disk, 21, 480, server)
    assert found["disk"].loaded > 0
    assert found["disk"].bad > 0
    assert found["store"].loaded > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_fault_changes_a_token_of_a_real_model(
    tmp_path: Path, server: ObjectStoreServer
) -> None:
    make_tiny_model("llama", tmp_path / "other")
    found = await struggle("smollm2", str(tmp_path / "other"), tmp_path / "kv", 14, 15, server)
    assert found["disk"].loaded > 0
    assert found["disk"].bad > 0
