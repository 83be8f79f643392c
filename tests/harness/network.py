"""Several hosts on one machine: network namespaces around this one, and a hub between them.

this machine (place 0, 10.77.N.1) ---\
namespace (place 1, 10.77.N.2) -------- hub (network_hub.py)
namespace (place 2, 10.77.N.3) -------/

The link of each namespace has a delay, a rate and a loss, and can be cut; the link of this machine
is perfect. Processes share everything else, including process ids, so NIXL would copy from memory
to memory. `Place.environment` restricts UCX to TCP on the hub's device, for workers started with
`--nixl-tcp insecure`; others use gRPC.

Needs root and /dev/net/tun: `why_not()` says what is missing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

_ROOT = Path(__file__).parents[2]
GBIT_BYTES_PER_S = 125e6


@dataclass(frozen=True)
class Shape:
    """The delay, rate and loss of a link, the same in both directions."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    loss: float = 0.0  # share of dropped packets


@dataclass(frozen=True)
class Place:
    """A network namespace in which processes can run."""

    number: int
    address: str
    device: str
    namespace: str = ""  # empty: this machine's own namespace

    @property
    def prefix(self) -> list[str]:
        """Command-line prefix that runs a program in this namespace."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make NIXL use TCP through the hub."""
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.device}


class Network:
    """`num_hosts` namespaces; `close` removes them. The caller ends the processes that it starts in
    them."""

    def __init__(self, num_hosts: int = 1, shape: Shape | None = None) -> None:
        tag = f"td{random.randrange(16**6):06x}"
        self._net = _free_net()
        devices = [f"{tag}-{number}" for number in range(num_hosts + 1)]
        self._hub = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.network_hub", *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            start_new_session=True,
        )
        self.home = Place(0, f"{self._net}.1", devices[0])
        self.hosts = [
            Place(number, f"{self._net}.{number + 1}", device, device)
            for number, device in enumerate(devices[1:], 1)
        ]
        try:
            self._await("ready")
            for place in (self.home, *self.hosts):
                self._configure(place)
            for host in self.hosts:
                self.shape(host, shape or Shape())
        except BaseException:
            self.close()
            raise

    def shape(self, host: Place, shape: Shape) -> None:
        self._command(host, **asdict(shape))

    def cut(self, host: Place) -> None:
        """Drops every packet to and from the host, including packets under way, until `heal`."""
        self._command(host, is_up=False)

    def heal(self, host: Place) -> None:
        self._command(host, is_up=True)

    @property
    def num_bytes_home(self) -> int:
        """Counts the bytes that this machine has received over the network."""
        counter = Path(f"/sys/class/net/{self.home.device}/statistics/rx_bytes")
        return int(counter.read_text())

    def close(self) -> None:
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        self._hub.stdin.close()
        try:
            self._hub.wait(5)
        except subprocess.TimeoutExpired:
            self._hub.kill()
            self._hub.wait()
        self._hub.stdout.close()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self, place: Place) -> None:
        inside = []
        if place.namespace:
            _ip("netns", "add", place.namespace)
            _ip("link", "set", place.device, "netns", place.namespace)
            inside = ["-n", place.namespace]
            _ip(*inside, "link", "set", "lo", "up")
            # Reno is always available, and is affected most by loss.
            setting = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            _run("ip", "netns", "exec", place.namespace, "sh", "-c", setting)
        _ip(*inside, "address", "add", f"{place.address}/24", "dev", place.device)
        _ip(*inside, "link", "set", place.device, "up")

    def _command(self, host: Place, **settings: float) -> None:
        assert self._hub.stdin is not None
        self._hub.stdin.write(json.dumps({"device": host.number, **settings}) + "\n")
        self._hub.stdin.flush()
        self._await("done")

    def _await(self, word: str) -> None:
        assert self._hub.stdout is not None
        found = self._hub.stdout.readline()
        if found != f"{word}\n":
            raise RuntimeError(f"the network's hub ended: {found!r}")


def why_not() -> str:
    """The reason why a network cannot be created on this machine; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    name = f"td{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"network namespaces are not permitted: {tried.stderr}" if tried.returncode else ""


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _free_net() -> str:
    """The first three bytes of an IPv4 network that no device of this machine uses."""
    taken = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True).stdout
    nets = [f"10.77.{number}" for number in range(256) if f"10.77.{number}." not in taken]
    if not nets:
        raise RuntimeError("all of 10.77.0.0/16 is taken")
    return random.choice(nets)
