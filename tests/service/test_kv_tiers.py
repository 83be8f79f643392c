"""Real engine processes with a tier on disk: killed, on a full disk, and with flipped bits.

kill         SIGKILL amid requests; the next process takes the folder
flip bits    the same, and bits of 1% of the folder's blocks are flipped before it starts
fill disk    files of both processes grow no more (RLIMIT_FSIZE), and then they may again
other model  a process with another model takes the folder for a while, and clears it
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tandem.config.cluster import ClusterConfig
from tandem.config.engine import EngineConfig
from tandem.config.transfer import TransferConfig
from tandem.config.worker import WorkerConfig
from tandem.engine.tiers.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.types import EngineLoad, NewTokens, TierLoad
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Add, Event, Report
from tests.engine_driver import make_spec
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.service

DEADLINE_S = 240.0
PROMPTS = [[(n * 7 + i * 13) % 60 + 2 for i in range(70)] for n in range(8)]
CHATS, TURNS = 20, 4  # prompts of several turns: each begins with the one before
SLOTS = 100  # of a tier, for the 140 blocks of all chats
FULL_BYTES = 1 << 17  # of a file on a full disk
AT_ONCE = 6
ENGINE = "tandem.worker.engine_process.process"
STAGED_ENGINE = "tests.harness.staged_engine"  # a device's copies, as late as they may be


class Process:
    """An engine process with a pool of 16 blocks, in which two of the prompts fit."""

    def __init__(
        self,
        model: str,
        folder: Path | None,
        *,
        disk_bytes: int = 1 << 34,
        engine_module: str = ENGINE,
        **settings: str,
    ) -> None:
        """`settings` are further ones of the engine."""
        self._engine_module = engine_module
        self._config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig(cluster_id="c", redis_url="redis://localhost", token="t"),
            engine=EngineConfig(
                model=model,
                device="cpu",
                num_blocks=16,
                kv_disk_path="" if folder is None else str(folder),
                kv_disk_bytes=disk_bytes,
                **settings,  # type: ignore[arg-type]
            ),
            transfer=TransferConfig(),
            worker_id="w",
        )
        self._ends: dict[str, asyncio.Future[NewTokens]] = {}
        self._token_ids: dict[str, list[int]] = {}
        self._loads: asyncio.Queue[EngineLoad] = asyncio.Queue()
        self.load = EngineLoad()

    async def start(self) -> None:
        self._link = EngineLink(
            self._config, "1", self._on_event, engine_module=self._engine_module
        )
        try:
            ready = await self._link.start()
        except BaseException:
            await self._link.stop()  # else its sockets hold up the collection of their context
            raise
        self.sizes = [size for _, size in ready.spans.pools]  # of a block of each KV group

    @property
    def tier(self) -> TierLoad:
        return self.load.tiers[0]

    async def answer(self, name: str, prompt: list[int]) -> tuple[list[int], int]:
        """Returns the tokens that follow, and how many tokens of the prompt were cached. Raises
        ConnectionError when the process is killed."""
        end = self._ends[name] = asyncio.get_running_loop().create_future()
        self._token_ids[name] = []
        self._link.send(Add(make_spec(name, prompt)))
        num_cached = (await end).num_cached_tokens
        return self._token_ids[name], num_cached

    async def wait_for_writes(self, num_blocks: int) -> None:
        while (await self._loads.get()).tiers[0].blocks_written < num_blocks:
            pass

    async def check_idle(self) -> None:
        """All pools are whole, and nothing is held by anyone."""
        assert await self._link.check_integrity() == ""
        while self.load.blocks_leaving:
            assert await self._link.check_integrity() == ""
        load = self.load
        held = load.num_running, load.num_waiting, load.num_awaiting_kv, load.num_prefill_only
        assert held == (0, 0, 0, 0)
        assert (load.blocks_used, load.blocks_quarantined) == (0, 0)

    def limit_files(self, num_bytes: int) -> None:
        """Lets no file of the process grow beyond so many bytes."""
        assert self._link._process is not None
        limit = (num_bytes, resource.RLIM_INFINITY)
        resource.prlimit(self._link._process.pid, resource.RLIMIT_FSIZE, limit)

    async def kill(self) -> None:
        for end in list(self._ends.values()):
            if not end.done():
                end.set_exception(ConnectionError("the process is killed"))
        self._link.kill("the test kills it")
        await self._link.stop()

    async def stop(self) -> None:
        await self._link.stop()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Report):
            return
        self.load = event.report.load
        self._loads.put_nowait(self.load)
        assert not event.report.failed
        for new in event.report.new_tokens:
            self._token_ids[new.sequence_id] += new.token_ids
            end = self._ends[new.sequence_id]
            if new.finish_reason and not end.done():
                end.set_result(new)


@pytest.mark.parametrize(
    ("family", "engine_module"), [("llama", ENGINE), ("gemma3", ENGINE), ("gemma3", STAGED_ENGINE)]
)
async def test_a_killed_engines_blocks_are_found_by_the_next(
    family: str, engine_module: str, tmp_path: Path
) -> None:
    model, folder = tmp_path / "model", tmp_path / "kv"
    make_tiny_model(family, model)
    async with asyncio.timeout(DEADLINE_S):
        plain = Process(str(model), None)
        await plain.start()
        expected = [(await plain.answer(str(n), p))[0] for n, p in enumerate(PROMPTS)]
        await plain.stop()
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


class Struggle:
    """Two processes on one folder, the requests of chats, and what is done to the processes."""

    def __init__(self, model: str, other: str, folder: Path) -> None:
        self.model, self.other, self.folder = model, other, folder
        self.rng = Random(0)
        self.num_loaded = self.num_bad = self.num_failed_writes = self.num_asked = 0

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

    async def make(self, model: str) -> Process:
        disk_bytes = sum(HEADER_BYTES + SLOTS * (size + RECORD_BYTES) for size in self.sizes)
        process = Process(model, self.folder, disk_bytes=disk_bytes)
        await process.start()
        return process

    async def bring_up(self, number: int) -> None:
        self.processes[number] = await self.make(self.model)
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
                process, name = self.rng.choice(self.living), str(self.num_asked)
                try:
                    tokens, _ = await process.answer(name, self.prompts[number])
                except ConnectionError:
                    continue
                assert tokens == self.expected[self.model][number]
                break

    async def round(self, number: int, count: int) -> None:
        """Asks `count` prompts while one deed is done."""
        deeds = self.kill, self.flip_bits, self.fill_disk, self.empty_disk, self.change_model
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self.ask(-(-count // AT_ONCE)))
            await deeds[number % len(deeds)](number // len(deeds) % 2)
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
            data, size = path.read_bytes(), self.sizes[group]
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
        other = await self.make(self.other)
        for turn in range(TURNS):
            tokens, _ = await other.answer(str(turn), self.prompts[turn])
            assert tokens == self.expected[self.other][turn]
        await other.stop()
        await self.bring_up(number)

    def take_counters(self, process: Process) -> None:
        if process.load.tiers:
            self.num_loaded += process.tier.blocks_loaded
            self.num_bad += process.tier.blocks_bad
            self.num_failed_writes += process.tier.write_failures

    async def stop(self) -> None:
        for process in self.living:
            self.take_counters(process)
            await process.stop()


async def struggle(model: str, other: str, folder: Path, num_rounds: int, count: int) -> Struggle:
    """Returns what happened when `count` requests were asked in each round."""
    found = Struggle(model, other, folder)
    await found.start()
    for number in range(num_rounds):
        await found.round(number, count)
    await found.stop()
    assert found.num_asked >= num_rounds * count
    assert found.num_failed_writes > 0
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MB, if the system lets us mount one."""
    folder = tmp_path / "kv"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, check=False).returncode == 0
    yield folder
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
async def test_no_fault_changes_a_token(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path / "model")
    make_tiny_model("qwen3", tmp_path / "other")
    async with asyncio.timeout(DEADLINE_S):
        await struggle(str(tmp_path / "model"), str(tmp_path / "other"), tmp_path / "kv", 5, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_no_fault_changes_a_token_of_10_000_requests(
    family: str, tmp_path: Path, small_disk: Path
) -> None:
    make_tiny_model(family, tmp_path / "model")
    make_tiny_model("qwen3", tmp_path / "other")
    found = await struggle(str(tmp_path / "model"), str(tmp_path / "other"), small_disk, 20, 500)
    assert found.num_loaded > 0
    assert found.num_bad > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_fault_changes_a_token_of_a_real_model(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path / "other")
    found = await struggle("smollm2", str(tmp_path / "other"), tmp_path / "kv", 10, 20)
    assert found.num_loaded > 0
