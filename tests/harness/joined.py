"""A cluster of two machines: `tandem up --listen` on the first, `tandem join` on the second.

The routers of both machines use the same ports. Calls go to the first machine's router unless
another machine is given.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.hosts import Machine
from tests.harness.network import Network
from tests.harness.waiting import wait_until
from tests.tiny_models import make_random_speaker

TOKEN = "a token of this test alone"
TANDEM = [sys.executable, "-m", "tandem.ops.cli"]
JOIN_PORT = 8100


@dataclass
class Joined:
    network: Network
    first: Machine
    second: Machine
    token_file: Path
    ca_sha256: str

    def join(self) -> None:
        options = ["--token-file", str(self.token_file), "--ca-sha256", self.ca_sha256]
        self.second.run(*TANDEM, "join", f"{self.first.address}:{JOIN_PORT}", *options)
        wait_until(lambda: "joined as" in self.second.text())

    @property
    def admin_url(self) -> str:
        return self.admin_url_of(self.first)

    def admin_url_of(self, machine: Machine) -> str:
        return f"http://{machine.address}:8002"

    def scale(self, *sizes: str) -> None:
        command = [*TANDEM, "scale", *sizes, "--url", self.admin_url, "--deadline", "120"]
        subprocess.run(command, check=True, timeout=130)

    def get(self, path: str, machine: Machine | None = None) -> Any:
        address = (machine or self.first).address
        port = 8002 if path.startswith("/v1/cluster") else 8000
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=10) as got:
            return json.load(got)

    def chat(
        self, text: str, machine: Machine | None = None, *, max_tokens: int = 8
    ) -> dict[str, Any]:
        address = (machine or self.first).address
        message = {"role": "user", "content": text}
        model = self.get("/v1/models", machine)["data"][0]["id"]
        body = {"model": model, "messages": [message], "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://{address}:8000/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))

    def agents(self, pool: str) -> list[dict[str, Any]]:
        return list(self.get("/v1/cluster")["pools"][pool].get("agents", []))

    def serves(self, worker_id: str) -> bool:
        workers = {w["worker_id"]: w for w in self.get("/v1/cluster")["workers"]}
        return worker_id in workers and workers[worker_id]["state"] == "ready"

    def decode_worker(self) -> dict[str, Any]:
        (found,) = (w for w in self.get("/v1/cluster")["workers"] if w["role"] == "decode")
        return dict(found)

    def logs(self, worker_id: str) -> subprocess.CompletedProcess[str]:
        """Runs `tandem logs` on this machine, which has no logs of the run."""
        return subprocess.run(
            [*TANDEM, "logs", worker_id, "--url", self.admin_url],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "XDG_STATE_HOME": str(self.token_file.parent)},
        )

    def listening(self, machine: Machine) -> set[tuple[str, int]]:
        shown = subprocess.run(
            [*machine.place.prefix, "ss", "-ltnH"], capture_output=True, text=True, check=True
        )
        found = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
        return {(address, int(port)) for address, _, port in found}

    def ports(self, machine: Machine) -> set[int]:
        """The ports on which the machine accepts connections from others."""
        return {
            port
            for address, port in self.listening(machine)
            if not address.startswith(("127.", "[::1]"))
        }


@contextmanager
def two_machines(folder: Path, *options: str) -> Iterator[Joined]:
    """Starts a cluster of a tiny model on one machine, with `options`, and joins another one."""
    model = make_random_speaker(folder / "model").path
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    with Network(2) as network:
        first, second = (Machine(place) for place in network.hosts)
        try:
            own = ["--listen", first.address, "--host", first.address, "--allow-anonymous"]
            own += ["--admin-host", first.address, "--join-token-file", str(token_file)]
            own += ["--model", str(model), "--numerics", "invariant", "--prefill-at", "remote"]
            own += ["--local-prefill-max-tokens", "0", "--kv-memory", "33554432"]
            first.run(*TANDEM, "up", *own, *options)
            found = wait_until(lambda: re.search(r"--ca-sha256 (\w+)", first.text()))
            made = Joined(network, first, second, token_file, found[1])
            made.join()
            yield made
        finally:
            first.close()
            second.close()
