"""Chats while each of three machines in turn is cut off, stopped, and killed and joined again.

    place 0: Redis, and this test    hosts 1 to 3: routers on two, workers    host 4: the client

The first machine is Ray's head at first; each loss of the head's machine makes another the head,
with a higher number. Each kind of fault hits a head at least once.

After a fault, the pools are whole when the other hosts alone have all routers and workers. The
state from before the fault is never taken for that: some of the workers are on the lost host then.
A fault begins only when no process of the pools starts or ends. So the workers of a machine that
was cut off or stopped count again after the fault, and the surplus has gone before the next one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.store.client import connect_blocking
from tandem.net.store.control_state import HEAD_KEY, Head, control_key
from tests.harness.host_chats import PROMPTS
from tests.harness.hosts import Machine, why_not
from tests.harness.network import Network
from tests.harness.waiting import wait_until
from tests.tiny_models import make_random_speaker

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CHATS = int(os.environ.get("HOSTS_CHATS", "1000"))
NUM_CLIENTS = os.environ.get("HOSTS_CLIENTS", "4")  # each sends its next chat when one has ended
WANTED = {"router": 2, "prefill": 2, "decode": 3}
TOKEN = "a token of this test alone"
START_DEADLINE_S = 180.0
WHOLE_S = 60.0
PATIENCE_S = 180.0  # on a machine that is busy: what took longer than `WHOLE_S` is said at the end
FAULT_S = 60.0
LEADS_S = 60.0  # until another machine is the head
PAIRS_S = 60.0
KINDS = ("kill", "cut", "stop")
SPREAD_S = 180.0  # until a machine that came back has workers, and no process starts or ends
TANDEM = [sys.executable, "-m", "tandem.ops.cli"]


@dataclass
class Hosts:
    """Three machines of one cluster."""

    network: Network
    machines: list[Machine]
    redis: EmbeddedRedis
    token_file: Path
    ca_sha256: str = ""
    faults: list[tuple[float, float, str, str]] = field(default_factory=list)
    heads: list[tuple[str, Head]] = field(default_factory=list)  # by the fault that made each
    faulty: Machine | None = None  # had the last fault
    lost: set[str] = field(default_factory=set)  # ids of the hosts that are lost now

    def start(self, model: Path) -> None:
        first = self.machines[0]
        options = ["--listen", first.address, "--host", first.address, "--allow-anonymous"]
        options += ["--admin-host", first.address, "--join-token-file", str(self.token_file)]
        options += ["--redis", self.redis.url, "--numerics", "invariant", "--model", str(model)]
        options += ["--routers", str(WANTED["router"]), "--kv-memory", "33554432"]
        first.run(*TANDEM, "up", *options, "--prefill", "1", "--decode", "1")
        wait_until(lambda: "--ca-sha256" in first.text(), START_DEADLINE_S, "the first machine")
        found = re.search(r"--ca-sha256 (\w+)", first.text())
        assert found
        self.ca_sha256 = found[1]
        for machine in self.machines[1:]:
            self.join(machine)
        url = f"http://{first.address}:8002"
        sizes = [f"{pool}={size}" for pool, size in WANTED.items() if pool != "router"]
        subprocess.run([*TANDEM, "scale", *sizes, "--url", url, "--deadline", "120"], check=True)
        wait_until(self.is_whole, START_DEADLINE_S, "the whole cluster")

    def join(self, machine: Machine) -> None:
        """Has a machine join at one of the others."""
        other = next(m for m in self.machines if m is not machine and m.runs)
        told = ["--token-file", str(self.token_file), "--ca-sha256", self.ca_sha256]
        machine.run(*TANDEM, "join", other.address, *told)
        wait_until(lambda: "joined as" in machine.text(), START_DEADLINE_S, "the machine")

    def state(self) -> dict[str, Any]:
        """Returns the cluster as the first router that answers sees it. The router of the machine
        that had the last fault is asked last: when it is back, it tells an old state at first."""
        for machine in sorted(self.machines, key=lambda machine: machine is self.faulty):
            with suppress(httpx.HTTPError, KeyError):
                got = httpx.get(f"http://{machine.address}:8002/v1/cluster", timeout=2)
                return dict(got.json())
        return {"pools": {}, "workers": []}

    def agents(self, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns the agents on hosts that are not lost, each with its pool, by their ids."""
        return {
            agent["id"]: {**agent, "pool": pool}
            for pool, told in state["pools"].items()
            for agent in told.get("agents", ())
            if agent["host"] not in self.lost
        }

    def is_whole(self, state: dict[str, Any] | None = None) -> bool:
        """Returns whether the hosts that are not lost have all processes of the pools, and these
        workers serve."""
        state = state or self.state()
        agents = self.agents(state)
        running = Counter(a["pool"] for a in agents.values() if a["state"] == "running")
        ready = Counter(
            w["role"]
            for w in state["workers"]
            if w["worker_id"] in agents and w["state"] == "ready" and w["connected"] is not False
        )
        return all(
            running[pool] == size and (pool == "router" or ready[pool] == size)
            for pool, size in WANTED.items()
        )

    def head(self) -> Head:
        """Returns Ray's head as Redis has it; its number is 0 while there is none that is up."""
        with closing(connect_blocking(self.redis.url)) as redis:
            (key,) = redis.keys(control_key("*", HEAD_KEY)) or [b""]
            found = redis.get(key) if key else None
        head = msgspec.json.decode(found, type=Head) if isinstance(found, bytes | str) else None
        return head if head is not None and head.address else Head(0, "")

    def is_head(self, machine: Machine) -> bool:
        return self.head().address.rpartition(":")[0] == machine.address

    def pairs_across(self) -> dict[tuple[str, str], str]:
        """Returns the transport of each pair of workers on two machines, the reader first."""
        workers = self.state()["workers"]
        machines = {w["worker_id"]: w["address"].rpartition(":")[0] for w in workers}
        return {
            (w["worker_id"], peer): transport
            for w in workers
            for peer, transport in w["transports"].items()
            if machines.get(peer, "") not in ("", machines[w["worker_id"]])
        }

    def used_host(self, machine: Machine) -> str:
        """Returns the id of the machine's host. It is empty unless the pools are whole with workers
        on this machine, and no process starts or ends."""
        state = self.state()
        agents = self.agents(state)
        if not self.is_whole(state) or any(a["state"] != "running" for a in agents.values()):
            return ""
        hosts: dict[str, str] = {
            w["address"].rpartition(":")[0]: agents[w["worker_id"]]["host"]
            for w in state["workers"]
            if w["worker_id"] in agents
        }
        return hosts.get(machine.address, "")

    def fault(self, kind: str, machine: Machine) -> float:
        """Lets a fault happen and pass, on a machine that has workers. Returns how long the other
        machines took to have whole pools."""
        what = f"settled pools with workers for {machine.address}"
        host = wait_until(lambda: self.used_host(machine), SPREAD_S, what)
        before = self.head()
        was_head = self.is_head(machine)
        self.faulty = machine
        self.lost.add(host)
        began = time.time()
        if kind == "cut":
            self.network.cut(machine.place)
        elif kind == "stop":
            machine.stop()
        else:
            machine.kill()
        if was_head:
            self._check_next_head(kind, before)
        wait_until(self.is_whole, PATIENCE_S, f"whole pools ({kind})")
        whole_s = time.time() - began
        left_s = FAULT_S - (time.time() - began)
        if kind != "kill" and left_s > 0:
            time.sleep(left_s)
        if kind == "cut":
            self.network.heal(machine.place)
        elif kind == "stop":
            machine.go_on()
        else:
            self.join(machine)
        if kind != "kill":  # a killed machine has joined as another host
            self.lost.remove(host)
        wait_until(self.is_whole, PATIENCE_S, f"whole pools after {kind}")
        self.faults.append((began, time.time(), machine.address, kind))
        return whole_s

    def _check_next_head(self, kind: str, before: Head) -> None:
        """Waits until another host than `before` is the head, and sees that it has the higher
        number."""
        assert before.number, "no head was up"

        def is_other() -> bool:
            return self.head().host not in ("", before.host)

        wait_until(is_other, LEADS_S, f"another head than {before.host} after {kind}")
        head = self.head()
        assert head.number > before.number, (before, head)
        self.heads.append((kind, head))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with Network(4) as network, EmbeddedRedis(host=network.home.address) as redis:
        machines = [Machine(place) for place in network.hosts[:3]]
        made = Hosts(network, machines, redis, token_file)
        try:
            made.start(make_random_speaker(tmp_path / "model").path)
            yield made
        finally:
            for machine in machines:
                if kept := os.environ.get("HOSTS_KEEP"):
                    subprocess.run(["cp", "-rL", machine.folder, kept], capture_output=True)
                machine.close()


@pytest.mark.timeout(2400)
def test_chats_go_on_while_machines_are_lost_and_come_back(hosts: Hosts, tmp_path: Path) -> None:
    _check_pairs(hosts)
    book = tmp_path / "chats"
    command = [sys.executable, "-m", "tests.harness.host_chats"]
    addresses = ",".join(machine.address for machine in hosts.machines)
    client_place = hosts.network.hosts[3]
    client = subprocess.Popen([*client_place.prefix, *command, addresses, NUM_CLIENTS, str(book)])
    whole_s: dict[str, float] = {}
    try:
        wait_until(lambda: len(_read(book)) > 3 * len(PROMPTS), 120, "the first chats")
        left = [(kind, machine) for machine in hosts.machines for kind in KINDS]
        while left:
            kind, machine = fault = _next_fault(hosts, left)
            left.remove(fault)
            name = f"{kind} {hosts.machines.index(machine)}"
            whole_s[name] = round(hosts.fault(kind, machine), 1)
            _check_pairs(hosts)
            print(name, whole_s[name], hosts.head(), len(_read(book)), flush=True)
        wait_until(lambda: len(_read(book)) >= NUM_CHATS, 600, "all chats")
    finally:
        client.kill()
        client.wait()
    assert {kind for kind, _ in hosts.heads} == set(KINDS), hosts.heads
    numbers = [head.number for _, head in hosts.heads]
    assert numbers == sorted(set(numbers)), hosts.heads
    chats = _read(book)
    with_router_lost = [c for c in chats if c["fault"] and _router_was_lost(hosts, c)]
    failed = [c for c in chats if c["fault"] and not _router_was_lost(hosts, c)]
    answers = {
        n: {c["text"] for c in chats if c["prompt"] == n and not c["fault"]} for n in range(12)
    }
    print(f"{len(chats)} chats, {len(with_router_lost)} lost their router, whole: {whole_s}")
    assert not failed, failed[:5]
    assert not [c for c in with_router_lost if c["retry"]], "a retry failed"
    assert {len(texts) for texts in answers.values()} == {1}, "an answer is not exact"
    assert max(whole_s.values()) <= WHOLE_S, whole_s


def _next_fault(hosts: Hosts, left: list[tuple[str, Machine]]) -> tuple[str, Machine]:
    """Returns a fault that hits the head, of a kind that hit none yet, or any that is left."""
    seen = {kind for kind, _ in hosts.heads}
    wait_until(lambda: hosts.head().number, LEADS_S, "a head")
    of_head = [(kind, m) for kind, m in left if kind not in seen and hosts.is_head(m)]
    return (of_head or left)[0]


def _check_pairs(hosts: Hosts) -> None:
    """Sees that workers on two machines read each other's blocks by gRPC, which is TCP alone: over
    NIXL, without RDMA, they could do so only as processes of one machine, through its memory."""
    across: dict[tuple[str, str], str] = {}

    def are_known() -> bool:
        across.update(hosts.pairs_across())
        return bool(across)

    wait_until(are_known, PAIRS_S, "a pair across hosts")
    assert set(across.values()) == {"grpc"}, across


def _read(book: Path) -> list[dict[str, Any]]:
    lines = book.read_text().split("\n")[:-1] if book.exists() else []
    return [json.loads(line) for line in lines]


def _router_was_lost(hosts: Hosts, chat: dict[str, Any]) -> bool:
    """Returns whether the machine of the chat's router had a fault meanwhile."""
    return any(
        address == chat["router"] and began - 1 < chat["ended"] and chat["began"] < ended + 1
        for began, ended, address, _ in hosts.faults
    )
