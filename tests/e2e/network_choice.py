"""Transfer or recompute: what the decode worker's choice costs against the better of both.

    python -m tests.e2e.network_choice [--networks near,far] [--lengths 128,...] [--repeats 5]

The prefill worker is in a network namespace behind 1 ms and 1 Gbit/s (near), then behind 20 ms,
1 Gbit/s and 1% loss (far), each way (tests/harness/network.py; needs root). Three decode workers on
this side take turns, one request at a time:

    local    computes every prompt where it decodes
    chosen   Tandem's own choice
    remote   has every prompt computed by the prefill worker, and pulls its blocks

for each prompt length, with a prompt that nobody has (cold) and with one that the prefill worker
has cached (warm). What counts is the time to the second token: the first that needs the blocks.
Regret is chosen / min(local, remote) - 1, of medians over the repeats. On a busy machine that is
noise for the most part; regret by choice takes for each choice the median of that way instead.
A remote request that takes three times as long as the better of the others is given up: it cannot
be the better of both.

Writes benchmarks/results/network_choice.json and prints the table of docs/measurements.md.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem_bench.framework import RESULTS, Report, numbers, options, run_main, table, words
from tests.harness.cluster import LocalCluster, WorkerProcess
from tests.harness.network import GBIT_BYTES_PER_S, Network, Shape

NETWORKS = {
    "near": Shape(delay_s=0.001, bytes_per_s=GBIT_BYTES_PER_S),
    "far": Shape(delay_s=0.02, bytes_per_s=GBIT_BYTES_PER_S, loss=0.01),
}
WAYS = {"local": "local", "chosen": "auto", "remote": "remote"}  # decode worker: --prefill-at
SOURCE = "prefill"
NUM_TOKENS = 4
GIVE_UP_RATIO = 3
REQUEST_DEADLINE_S = 300.0
_numbers = itertools.count()


@dataclass
class Sample:
    second_token_s: float = float("inf")  # infinite: given up
    first_token_s: float = float("inf")
    transport: str = ""  # local, nixl or grpc


@dataclass
class Cell:
    """All samples of one network, prompt length and state of the prefill worker's cache."""

    network: str
    num_tokens: int
    cached: bool
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median_s(self, way: str) -> float:
        return statistics.median(sample.second_token_s for sample in self.samples[way])

    @property
    def regret(self) -> float:
        return self.median_s("chosen") / min(self.median_s("local"), self.median_s("remote")) - 1

    @property
    def regret_by_choice(self) -> float:
        local_s, remote_s = self.median_s("local"), self.median_s("remote")
        if local_s == remote_s:
            return 0.0
        took_s = [local_s if s.transport == "local" else remote_s for s in self.samples["chosen"]]
        return statistics.median(took_s) / min(local_s, remote_s) - 1

    @property
    def share_remote(self) -> float:
        chosen = self.samples["chosen"]
        return sum(sample.transport != "local" for sample in chosen) / len(chosen)

    def row(self) -> dict[str, Any]:
        medians = {way: self.median_s(way) for way in WAYS}
        return {
            "network": self.network,
            "prompt_tokens": self.num_tokens,
            "cached_at_prefill_worker": self.cached,
            "second_token_ms": {
                way: round(1000 * s, 1) if s < float("inf") else None for way, s in medians.items()
            },
            "chosen_remote": self.share_remote,
            "regret": round(self.regret, 4),
            "regret_by_choice": round(self.regret_by_choice, 4),
            "transports": sorted({s.transport for s in self.samples["remote"] if s.transport}),
            "samples_ms": {
                way: [round(1000 * s.second_token_s, 1) if s.transport else None for s in found]
                for way, found in self.samples.items()
            },
        }


@options
class Options:
    lengths: str = "128,256,512,1024,2048,4000"
    """Tokens of the prompts."""
    repeats: int = 5
    transport: str = "auto"
    networks: str = "near,far"
    output: Path = RESULTS / "network_choice.json"


def main(options: Options = Options()) -> None:
    report = Report(options.output)
    networks = words(options.networks)
    cells: list[Cell] = []
    for name in networks:
        with running(NETWORKS[name], options.transport) as cluster:
            cells += measure(cluster, name, numbers(options.lengths), options.repeats)
    result = {
        "rows": [cell.row() for cell in cells],
        "median_regret": {
            name: round(statistics.median(c.regret for c in cells if c.network == name), 4)
            for name in networks
        },
        "median_regret_of_all": round(statistics.median(cell.regret for cell in cells), 4),
        "median_regret_by_choice": round(statistics.median(c.regret_by_choice for c in cells), 4),
        "repeats": options.repeats,
    }
    report.write(**result)
    print_table(result)


@contextmanager
def running(shape: Shape, transport: str) -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(1, shape) as network,
        EmbeddedRedis(host=network.home.address) as redis,
    ):
        options = ("--transport", transport, "--kv-memory", str(512 << 20))
        options += ("--nixl-tcp", "insecure" if transport == "nixl" else "off")
        cluster = LocalCluster(redis, Path(folder), options=(*options, "--pull-deadline", "300"))
        try:
            cluster.start_router()  # asks no one: requests go to the workers, but it sees readiness
            cluster.start_worker(SOURCE, "prefill", "--cores", "0", at=network.hosts[0])
            for way, prefill_at in WAYS.items():
                more = ("--prefill-at", prefill_at, "--cores", "1")
                cluster.start_worker(way, "decode", *more, at=network.home)
            cluster.wait_ready()
            yield cluster
        finally:
            cluster.close()


def measure(cluster: LocalCluster, name: str, lengths: list[int], repeats: int) -> list[Cell]:
    for length, worker in itertools.product((300, 1200), cluster.workers.values()):
        ask(worker, prompt(length))  # computed where it decodes: so each knows its own speed
    for length, way in itertools.product((150, 600), ("chosen", "remote")):
        ask(cluster.workers[way], prompt(length), source=candidate(cluster, 0))
        cluster.wait_idle(REQUEST_DEADLINE_S)
    cells = [Cell(name, length, cached) for length in lengths for cached in (False, True)]
    for _ in range(repeats):
        for cell in cells:
            take_turn(cluster, cell)
            last = {way: f"{found[-1].second_token_s:.3f} s" for way, found in cell.samples.items()}
            state = "warm" if cell.cached else "cold"
            choice = cell.samples["chosen"][-1].transport
            print(name, cell.num_tokens, state, last, "chose", choice, flush=True)
    return cells


def take_turn(cluster: LocalCluster, cell: Cell) -> None:
    """One sample of each way; the remote one last, when it is known what it has to beat."""
    cached = prompt(cell.num_tokens)
    if cell.cached:
        ask(cluster.workers[SOURCE], cached)
    others = []
    for way in WAYS:
        token_ids = cached if cell.cached else prompt(cell.num_tokens)
        source = candidate(cluster, len(token_ids) // 16 if cell.cached else 0)
        give_up_s = GIVE_UP_RATIO * min(others) if way == "remote" else REQUEST_DEADLINE_S
        sample = ask(cluster.workers[way], token_ids, source=source, give_up_s=give_up_s)
        cell.samples[way].append(sample)
        others.append(sample.second_token_s)
        cluster.wait_idle(REQUEST_DEADLINE_S)


def prompt(num_tokens: int) -> list[int]:
    """One that nobody has seen."""
    return [random.randrange(100, 40_000) for _ in range(num_tokens)]


def candidate(cluster: LocalCluster, cached_blocks: int) -> pb.PrefillCandidate:
    record = cluster.records()[SOURCE]
    return pb.PrefillCandidate(
        worker_id=SOURCE,
        epoch=record["epoch"].partition(":")[0],
        address=record["address"],
        cached_blocks=cached_blocks,
    )


def ask(
    worker: WorkerProcess,
    token_ids: list[int],
    *,
    source: pb.PrefillCandidate | None = None,
    give_up_s: float = REQUEST_DEADLINE_S,
) -> Sample:
    """One request, alone, as a router would send it."""
    submit = pb.SubmitSequence(
        request_id=f"choice-{next(_numbers)}",
        input=pb.SequenceInput(
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=pb.Sampling(top_p=1.0),
            max_tokens=NUM_TOKENS,
        ),
        prefill_candidates=[source] if source else [],
    )
    commands: SimpleQueue[pb.DecodeCommand | None] = SimpleQueue()
    commands.put(pb.DecodeCommand(submit=submit))
    stream = worker.stub().Decode(
        iter(commands.get, None), metadata=token_metadata(worker.token), timeout=give_up_s
    )
    sample = Sample()
    times = []
    began = time.perf_counter()
    try:
        for update in (update for message in stream for update in message.sequences):
            times += [time.perf_counter() - began] * len(update.token_ids)
            if update.finish_reason:
                assert update.finish_reason == "length", update
                sample = Sample(times[1], times[0], update.timings.transport)
                break
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    finally:
        commands.put(None)
        stream.cancel()
    return sample


def print_table(result: dict[str, Any]) -> None:
    columns = "network", "prompt", "cached there", *WAYS, "remote chosen", "regret", "by choice"
    rows = (
        (
            row["network"],
            f"{row['prompt_tokens']:,}",
            "all" if row["cached_at_prefill_worker"] else "no",
            *(
                "given up" if ms is None else f"{ms:,.0f} ms"
                for ms in row["second_token_ms"].values()
            ),
            f"{row['chosen_remote']:.0%}",
            f"{row['regret']:.1%}",
            f"{row['regret_by_choice']:.1%}",
        )
        for row in result["rows"]
    )
    print(table(" | ".join(columns), rows))
    print("median regret:", result["median_regret"], "all:", result["median_regret_of_all"])
    print("by choice:", result["median_regret_by_choice"])


if __name__ == "__main__":
    run_main(main)
