"""Ways in which a decode worker obtains a request's KV, on real clusters.

aggregated   one worker computes everything
nixl, grpc   a prefill worker computes the prompt, and the blocks are pulled (cuda_ipc: on GPUs)
preempted    the pool is too small for the concurrent requests
migrated     the decode worker leaves the pool while its requests run, and another one joins
speculating  one worker computes everything, and all proposed tokens are verified
drafting     the blocks are pulled, and all tokens that the model itself proposes are verified
ranks        two ranks compute the prompt, and two ranks decode
disk         a worker that starts again loads the KV that it wrote to its disk before
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.engine import EngineOptions
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig
from tandem.models.limits import check_settings
from tests.harness.client import metric, migrations, open_client
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.slow_engine import ALWAYS_VARIABLE, HOLD_VARIABLE

Answer = dict[str, Any]
ParityRequest = tuple[str, dict[str, Any]]  # path and body

WAYS = ("aggregated", "nixl", "grpc", "preempted", "migrated")
# The settings of workers in further ways, which some models do not support.
FURTHER_WAYS = {
    "ranks": EngineOptions(tensor_parallel=2),
    "disk": EngineOptions(kv_disk_path="kv", kv_tier_policy="lru"),
}
AT_ONCE = 8
_SMALL_POOL = 20  # blocks: enough for any one sequence, not for the concurrent ones
_SLOW = "tests.harness.slow_engine"


@dataclass
class Way:
    """One way: a cluster, and what is done to it while it answers."""

    name: str
    cluster: LocalCluster

    async def send_all(self, sent: Sequence[ParityRequest]) -> list[Answer]:
        """Sends all requests, several at a time. Raises AssertionError for any status but 200."""
        answers: list[Answer] = []
        async with open_client(self.cluster) as client:
            for start in range(0, len(sent), AT_ONCE):
                answers += await self._send_some(client, sent[start : start + AT_ONCE])
        return answers

    async def _send_some(
        self, client: httpx.AsyncClient, sent: Sequence[ParityRequest]
    ) -> list[Answer]:
        return list(await asyncio.gather(*(_send(client, *one) for one in sent)))

    def disturbances(self) -> float:
        """Counts how often the way's event occurred, such as a preemption."""
        if self.name == "preempted":
            return metric(self.cluster, "decode-0", "tandem_preemptions_total")
        transport = "nixl" if self.name == "ranks" else self.name
        return metric(
            self.cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport=transport
        )


@dataclass
class Held(Way):
    """Requests that run at the same time: decode steps are slow until enough of them run."""

    decodes: str = "decode-0"

    async def _send_some(
        self, client: httpx.AsyncClient, sent: Sequence[ParityRequest]
    ) -> list[Answer]:
        hold = _hold_file(self.cluster)
        hold.touch()
        answers = asyncio.gather(*(_send(client, *one) for one in sent))
        await asyncio.to_thread(self._wait_running, self._enough(len(sent)), answers)
        await self._disturb()
        hold.unlink()
        return list(await answers)

    def _enough(self, num_asked: int) -> int:
        return min(2, num_asked)

    def _wait_running(self, wanted: int, answers: asyncio.Future[list[Answer]]) -> None:
        """Waits until `wanted` requests decode, until all have ended, or for a while if the worker
        cannot run so many."""
        with contextlib.suppress(TimeoutError):
            wait_for(
                lambda: (
                    answers.done()
                    or metric(self.cluster, self.decodes, "tandem_num_running") >= wanted
                ),
                deadline_s=10.0,
                what="running",
            )

    async def _disturb(self) -> None:
        """Does something to the cluster while the requests run."""


@dataclass
class Migrated(Held):
    """Requests of a worker that leaves the decode pool while they run, when another worker
    joins."""

    comes: str = "prefill-0"

    def _enough(self, num_asked: int) -> int:
        return num_asked // 2 + 1

    async def _disturb(self) -> None:
        await self._flip(self.comes, "decode")
        await self._flip(self.decodes, "prefill")
        self.decodes, self.comes = self.comes, self.decodes

    async def _flip(self, worker_id: str, role: str) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            url = f"{self.cluster.admin_url}/v1/cluster/workers/{worker_id}/role"
            reply = await client.post(url, json={"role": role})
        assert reply.status_code == 200, reply.text
        await asyncio.to_thread(
            wait_for,
            lambda: self.cluster.records()[worker_id]["role"] == role,
            deadline_s=120,
            what=f"{worker_id} as {role}",
        )

    def disturbances(self) -> float:
        return migrations(self.cluster, "drain")


class Speculating(Way):
    """Sends each request twice. The second time, its first answer is proposed."""

    async def send_all(self, sent: Sequence[ParityRequest]) -> list[Answer]:
        await super().send_all(sent)
        return await super().send_all(sent)

    def disturbances(self) -> float:
        """Counts the accepted tokens."""
        return metric(self.cluster, "decode-0", "tandem_accepted_tokens_total")


class Drafting(Way):
    """The model is its own draft model."""

    def disturbances(self) -> float:
        """Counts the accepted tokens."""
        return metric(self.cluster, "decode-0", "tandem_accepted_tokens_total")


class Restarted(Way):
    """A worker whose KV is on its disk, and which starts again between requests."""

    def restart(self) -> None:
        """Starts the worker again, without the blocks of its pool."""
        self.cluster.workers["decode-0"].stop()
        self.cluster.start_worker("decode-0", "decode")
        self.cluster.wait_ready()

    def disturbances(self) -> float:
        """Counts the blocks on the disk."""
        return metric(self.cluster, "decode-0", "tandem_kv_tier_blocks_written_total", tier="disk")


def why_refused(name: str, model: ModelConfig) -> str:
    """Returns why the model cannot be served in a way, in the words of the product, or ""."""
    try:
        check_settings(FURTHER_WAYS.get(name, EngineOptions()), model)
    except ConfigError as error:
        return str(error)
    return ""


async def send_all_ways(
    ways: Mapping[str, Way], sent: Sequence[ParityRequest], *, in_turn: bool = False
) -> dict[str, list[Answer]]:
    """Sends all requests in all ways, concurrently by default. Returns the answers by way."""
    if in_turn:
        return {name: await way.send_all(sent) for name, way in ways.items()}
    answers = await asyncio.gather(*(way.send_all(sent) for way in ways.values()))
    return dict(zip(ways, answers, strict=True))


@contextmanager
def all_disturbed(ways: Mapping[str, Way]) -> Iterator[None]:
    """Raises AssertionError if a way's event did not occur within the block."""
    before = {name: way.disturbances() for name, way in ways.items() if name != "aggregated"}
    yield
    for name, count in before.items():
        assert ways[name].disturbances() > count, f"nothing was {name}"


@contextmanager
def start_ways(
    redis: EmbeddedRedis,
    folder: Path,
    model: str,
    *more: str,
    small_pool: int = _SMALL_POOL,
    names: Sequence[str] = WAYS,
    ranks: tuple[int, int] = (1, 1),
    speculation: str = "off",
) -> Iterator[dict[str, Way]]:
    """Starts the clusters of these ways concurrently, with `more` options for their workers, and
    stops them at the end. `small_pool` is a number of blocks that causes preemptions. `ranks` are
    the ranks of prefill and of decode workers, and `speculation` is the value of
    --speculative-config, except for the way `aggregated`."""
    disk = (
        *("--kv-disk-path", str(folder / "kv"), "--kv-tier-policy", "lru"),
        *("--kv-disk-size", str(64 << 20)),  # a worker that starts looks at each place on the disk
    )
    remote = ("--prefill-at", "remote", "--local-prefill-max-tokens", "0")
    wanted: dict[str, tuple[type[Way], tuple[int, int], tuple[str, ...]]] = {
        "aggregated": (Way, (0, 1), ()),
        "cuda_ipc": (Way, (1, 1), (*remote, "--transport", "cuda_ipc")),
        "nixl": (Way, (1, 1), (*remote, "--transport", "nixl")),
        "grpc": (Way, (1, 1), (*remote, "--transport", "grpc")),
        "preempted": (Held, (0, 1), ("--num-blocks", str(small_pool))),
        "migrated": (Migrated, (1, 1), (*remote, "--transport", "nixl")),
        "speculating": (Speculating, (0, 1), ()),
        "drafting": (Drafting, (1, 1), (*remote, "--transport", "nixl")),
        "ranks": (Way, (1, 1), (*remote, "--transport", "nixl")),
        "disk": (Restarted, (0, 1), disk),
    }
    ways = {}
    with ThreadPoolExecutor() as closing, ExitStack() as stack:
        for name in names:
            kind, (prefill, decode), options = wanted[name]
            (folder / name).mkdir()
            cluster = LocalCluster(redis, folder / name, model)
            cluster.options = (*cluster.options, *options, *more)
            # On a busy machine, requests would be refused as too late.
            cluster.router_options = (*cluster.router_options, "--ttft-limit", "0")
            stack.callback(closing.submit, cluster.close)
            cluster.start_router()
            own = {"aggregated": "off", "speculating": "auto", "drafting": draft_setting(model)}
            setting = own.get(name, speculation)
            if setting != "off":
                cluster.options = (*cluster.options, "--speculative-config", setting)
            environment = {} if setting == "off" else {ALWAYS_VARIABLE: "1"}
            if issubclass(kind, Held):
                environment[HOLD_VARIABLE] = str(_hold_file(cluster))
            roles = (("prefill", prefill, ranks[0]), ("decode", decode, ranks[1]))
            for role, count, num_ranks in roles:
                degree = {"aggregated": 1, "disk": 1, "ranks": 2}.get(name, num_ranks)
                for number in range(count):
                    cluster.start_worker(
                        f"{role}-{number}",
                        role,
                        *("--tensor-parallel", str(degree)),
                        module=(_SLOW, "worker") if environment else ("tandem.worker",),
                        environment=environment,
                    )
            ways[name] = kind(name, cluster)
        for way in ways.values():
            way.cluster.wait_ready()
        yield ways
        for way in ways.values():
            way.cluster.wait_idle()


def draft_setting(model: str) -> str:
    """Returns the value of --speculative-config with a draft model."""
    given = {"method": "draft_model", "model": model, "num_speculative_tokens": 5}
    return json.dumps(given)


def _hold_file(cluster: LocalCluster) -> Path:
    return cluster.folder / "hold"


async def _send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    response = await client.post(path, json=body)
    assert response.status_code == 200, f"{response.text}\n{path} {body}"
    answer: Answer = response.json()
    return answer
