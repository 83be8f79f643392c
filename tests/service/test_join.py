"""Two machines in one cluster: one joins, gets a worker, and is lost."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.joining.call import ask_to_join
from tandem.cluster.operate import show_status
from tandem.errors import ConfigError
from tests.harness.hosts import Machine, why_not
from tests.harness.network import Network, Shape
from tests.tiny_models import make_random_speaker

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.service

TOKEN = "a token of this test alone"
DEADLINE_S = 120.0
TANDEM = [sys.executable, "-m", "tandem.cli"]
JOIN_PORT = 8100
GCS_PORT = 8101
NEVER_OPEN = (10001, 8265)  # Ray's client server and its dashboard
SLOW_BYTES_PER_S = 8e6


def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Waits until `condition` is true, and returns its value."""
    give_up_at = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at, "it never came about"
        time.sleep(0.1)
    return found


@dataclass
class Joined:
    network: Network
    first: Machine
    second: Machine
    token_file: Path
    ca_sha256: str

    def join(self) -> None:
        told = ["--token-file", str(self.token_file), "--ca-sha256", self.ca_sha256]
        self.second.run(*TANDEM, "join", f"{self.first.address}:{JOIN_PORT}", *told)
        eventually(lambda: "joined as" in self.second.text())

    @property
    def admin_url(self) -> str:
        return f"http://{self.first.address}:8002"

    def scale(self, size: str) -> None:
        subprocess.run([*TANDEM, "scale", size, "--url", self.admin_url], check=True, timeout=60)

    def get(self, path: str) -> Any:
        port = 8002 if path.startswith("/v1/cluster") else 8000
        with urllib.request.urlopen(f"http://{self.first.address}:{port}{path}", timeout=10) as got:
            return json.load(got)

    def chat(self, text: str) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        body = {"model": self.get("/v1/models")["data"][0]["id"], "messages": [message]}
        request = urllib.request.Request(
            f"http://{self.first.address}:8000/v1/chat/completions",
            json.dumps({**body, "max_tokens": 8, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))

    def agents(self, pool: str) -> list[dict[str, Any]]:
        return list(self.get("/v1/cluster")["pools"][pool]["agents"])

    def serves(self, worker_id: str) -> bool:
        workers = {w["worker_id"]: w for w in self.get("/v1/cluster")["workers"]}
        return worker_id in workers and workers[worker_id]["state"] == "ready"

    def decode_worker(self) -> dict[str, Any]:
        (found,) = (w for w in self.get("/v1/cluster")["workers"] if w["role"] == "decode")
        return dict(found)

    def listening(self, machine: Machine) -> set[tuple[str, int]]:
        shown = subprocess.run(
            [*machine.place.prefix, "ss", "-ltnH"], capture_output=True, text=True, check=True
        )
        found = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
        return {(address, int(port)) for address, _, port in found}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    folder = tmp_path_factory.mktemp("join")
    model = make_random_speaker(folder / "model").path
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    with Network(2) as network:
        first, second = (Machine(place) for place in network.hosts)
        try:
            options = ["--listen", first.address, "--host", first.address, "--allow-anonymous"]
            options += ["--admin-host", first.address, "--join-token-file", str(token_file)]
            options += ["--prefill", "0", "--decode", "1", "--model", str(model)]
            options += ["--numerics", "invariant", "--prefill-at", "remote"]
            options += ["--local-prefill-max-tokens", "0"]
            first.run(*TANDEM, "up", *options, "--kv-memory", "33554432")
            found = eventually(lambda: re.search(r"--ca-sha256 (\w+)", first.text()))
            made = Joined(network, first, second, token_file, found[1])
            made.join()
            yield made
        finally:
            first.close()
            second.close()


def test_a_strange_authority_learns_no_token_and_a_wrong_token_gets_nothing(joined: Joined) -> None:
    where = (joined.first.address, JOIN_PORT)
    with pytest.raises(ConfigError, match="The token was not sent"):
        ask_to_join(*where, token=TOKEN, ca_sha256="ab" * 32, own_address="")
    with pytest.raises(ConfigError, match="the token is wrong"):
        ask_to_join(*where, token=TOKEN + "x", ca_sha256=joined.ca_sha256, own_address="")


def test_ray_answers_only_over_tls_with_a_certificate(joined: Joined) -> None:
    ports = {port for _, port in joined.listening(joined.first)}
    assert GCS_PORT in ports
    assert not ports & set(NEVER_OPEN)
    # `get_server_certificate` presents none: the server ends that handshake, or what comes after.
    pem = ssl.get_server_certificate((joined.first.address, GCS_PORT), timeout=5)
    assert pem.startswith("-----BEGIN CERTIFICATE-----")


def test_a_worker_goes_near_its_peers_where_as_many_of_its_pool_are(
    joined: Joined, capsys: pytest.CaptureFixture[str]
) -> None:
    joined.network.shape(joined.second.place, Shape(bytes_per_s=SLOW_BYTES_PER_S))
    joined.scale("prefill=2")
    far, near = (agent["host"] for agent in joined.agents("prefill"))
    assert far in joined.second.text()
    eventually(lambda: joined.decode_worker()["transports"].keys() == {"prefill-0", "prefill-1"})
    joined.scale("prefill=3")
    # The second machine has two workers less, and each of them one prefill worker.
    added = joined.agents("prefill")[-1]
    assert added["host"] == near
    show_status(joined.admin_url)
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    found = re.search(rf"prefill-2 is on {near}: {far} has ([\d.]+) MB/s to the decode", told)
    assert found, told
    assert float(found[1]) * 1e6 < 2 * SLOW_BYTES_PER_S
    joined.network.shape(joined.second.place, Shape())
    joined.scale("prefill=1")


def test_a_worker_goes_to_the_machine_that_joined_and_elsewhere_when_that_is_lost(
    joined: Joined,
) -> None:
    joined.scale("prefill=1")
    (agent,) = joined.agents("prefill")
    assert agent["host"] in joined.second.text()
    # No memory is shared between the two hosts, and NIXL does not use TCP.
    eventually(lambda: joined.decode_worker()["transports"].get("prefill-0") == "grpc")
    before = joined.chat("What is gravity?")
    assert "prefill-0" in json.dumps(joined.get(f"/v1/requests/{before['id']}"))
    joined.second.kill()
    eventually(lambda: joined.serves("prefill-1"), 60)
    states = {agent["id"]: agent["state"] for agent in joined.agents("prefill")}
    assert states == {"prefill-0": "lost", "prefill-1": "running"}
    eventually(lambda: "prefill-1" in joined.decode_worker()["transports"], 60)
    after = joined.chat("What is gravity?")
    assert after["choices"] == before["choices"]


@pytest.mark.slow
def test_a_machine_that_leaves_hands_over_first(joined: Joined) -> None:
    joined.second.kill()
    joined.join()
    before = {agent["id"] for agent in joined.agents("decode")}
    joined.scale("decode=2")
    (added,) = (a for a in joined.agents("decode") if a["id"] not in before)
    assert added["host"] in joined.second.text()
    eventually(lambda: joined.serves(added["id"]))
    joined.second.terminate()
    on_first = [a for a in joined.agents("decode") if a["host"] != added["host"]]
    assert len([a for a in on_first if a["state"] == "running"]) == 2
    assert all(joined.serves(agent["id"]) for agent in on_first if agent["state"] == "running")
    # It has drained: nothing of it was lost.
    assert not [a for a in joined.agents("decode") if a["host"] == added["host"]]
