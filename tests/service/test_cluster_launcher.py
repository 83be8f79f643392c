"""`tandem up` as a person meets it: started, disturbed, stopped, killed; with the real model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cluster.processes import guardian
from tandem.net.observability.log_file import FILE_VARIABLE
from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.cluster import free_port
from tests.harness.explained import KILLED, OTHER_MODEL, STOPPED, WRONG_TOKEN, Faulty, look
from tests.harness.hpack import hpack_attack
from tests.harness.surfaces import Surfaces, report
from tests.harness.waiting import wait_until
from tests.lora_adapters import write_adapter
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 180.0
GRPC_MEMORY = 128 << 20
# Stands for make: starts the launcher, tells its pid, and waits.
PARENT = """
import os, subprocess, sys
command = [*sys.argv[1:], "--die-with-parent", str(os.getpid())]
print(subprocess.Popen(command, stdout=sys.stderr).pid, flush=True)
sys.stdin.read()
"""


RAY_IS_UP = "Ray's head is up"
PORTS = ("--port", "--grpc-port", "--admin-port", "--admin-grpc-port")


def free_ports() -> dict[str, int]:
    """A free port for each of the options."""
    return {option: free_port() for option in PORTS}


def command(ports: dict[str, int], *options: str) -> list[str]:
    words = [word for option, port in ports.items() for word in (option, str(port))]
    return [
        sys.executable,
        "-m",
        "tandem.ops.cli",
        "up",
        *words,
        "--kv-memory",
        "67108864",
        *options,
    ]


@dataclass(slots=True)
class Up:
    """A cluster that `tandem up` started, under a parent as make is one."""

    parent: subprocess.Popen[bytes]
    launcher_pid: int
    screen: Path
    ports: dict[str, int]
    cluster_id: str = field(default="")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['--port']}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['--admin-port']}"

    def get(self, path: str) -> Any:
        url = self.admin_url if path.startswith("/v1/cluster") else self.url
        with urllib.request.urlopen(url + path, timeout=10) as reply:
            return json.load(reply)

    def complete(self) -> str:
        body = {"model": self.get("/v1/models")["data"][0]["id"], "prompt": "The sky is"}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "max_tokens": 4, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def pids(self, name: str) -> list[int]:
        """Returns the cluster's processes with this text in their command lines."""
        found = []
        for pid in guardian.cluster_processes(self.cluster_id):
            try:
                if name in " ".join(psutil.Process(pid).cmdline()):
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
        return found


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with started(tmp_path_factory.mktemp("up"), "--grpc-memory", str(GRPC_MEMORY)) as made:
        wait_until(lambda: RAY_IS_UP in _screen(made), START_DEADLINE_S)
        yield made


@contextmanager
def started(
    folder: Path, *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Up]:
    """Starts a cluster and waits until it serves requests."""
    screen = folder / "screen"
    deep = screen.parent / ("deep-" * 20)  # paths of sockets have 107 bytes at most
    deep.mkdir()
    ports = free_ports()
    with screen.open("wb") as out:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command(ports, *options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            env={
                **os.environ,
                "TMPDIR": str(deep),
                "XDG_STATE_HOME": str(folder),
                **environment,
            },
            start_new_session=True,
        )
    assert parent.stdout is not None
    made = Up(parent, int(parent.stdout.readline()), screen, ports)
    try:
        wait_until(lambda: "Ctrl-C stops" in _screen(made), START_DEADLINE_S)
        made.cluster_id = made.get("/v1/cluster")["cluster_id"]
        yield made
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if made.cluster_id:
            wait_until(lambda: not guardian.cluster_processes(made.cluster_id), 10)


def _screen(up: Up) -> str:
    text = up.screen.read_text()
    assert _runs(up.launcher_pid), text
    return text


def _grpc_agents(up: Up) -> list[dict[str, Any]]:
    return up.get("/v1/cluster")["pools"]["grpc"].get("agents", [])


def _finish_reason(channel: grpc.Channel) -> str:
    """Returns why a short answer over gRPC ended; "" while the new replica loads its tokenizer."""
    request = inference_pb2.GenerateRequest(text="The sky is", max_tokens=4)
    call = InferenceStub(channel).Generate(request, wait_for_ready=True, timeout=60)
    try:
        return [message.finish_reason for message in call][-1]
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return ""


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_screen_has_what_a_person_needs(up: Up) -> None:
    text = up.screen.read_text()
    for port in up.ports.values():
        assert f"127.0.0.1:{port}" in text
    for process in ("router-0", "grpc-0", "prefill-0", "decode-0"):
        assert re.search(rf"s  {process} \(\d+\.\d s\)$", text, re.M)
    assert f"curl {up.url}/v1/chat/completions" in text
    summary = text[text.index("\nready after") : text.index("Ray is still starting")]
    assert len(summary.strip().splitlines()) < 15
    assert re.search(r"kernels  compiled C\+\+ \(\w+\)", summary)
    assert re.search(r"room for [\d,]+ tokens", summary)
    assert up.complete()


def test_commands_find_the_cluster_and_a_model_talks(up: Up) -> None:
    tandem = [sys.executable, "-m", "tandem"]
    environment = {**os.environ, "NO_COLOR": "1", "XDG_STATE_HOME": str(up.screen.parent)}
    environment.pop("TANDEM_ADMIN_URL", None)
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, env=environment)
    state = json.loads(run([*tandem, "status", "--json"]).stdout)
    assert state["cluster_id"] == up.cluster_id
    answer = run([*tandem, "chat", "--temperature", "0", "--max-tokens", "8", "Say hello."])
    assert answer.stdout.strip(), answer.stderr


def test_logs_are_those_of_the_cluster(up: Up) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(up.screen.parent), "NO_COLOR": "1"}
    environment["TANDEM_ADMIN_URL"] = up.admin_url
    tandem = [sys.executable, "-m", "tandem", "logs"]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, env=environment)
    names = [line.split()[0] for line in run(tandem).stdout.splitlines()[1:]]
    assert {"decode-0", "grpc-0", "prefill-0", "router-0"} <= set(names)
    other = up.screen.parent / "tandem" / "runs" / "20990101T000000Z-local-other"
    other.mkdir()
    try:
        for name in ("decode-0", "decode-9"):
            (other / f"{name}.log").write_text("another cluster\n")
        assert "engine loaded" in (shown := run([*tandem, "decode-0"]).stdout)
        assert "another cluster" not in shown
        unknown = run([*tandem, "decode-9"])
        assert unknown.returncode == 1
        assert "it has these logs of the cluster: decode-0, " in unknown.stderr
    finally:
        shutil.rmtree(other)


def test_secrets_are_in_no_command_line_and_no_file(up: Up) -> None:
    (pid, *_) = up.pids("tandem.worker --role decode")
    environment = psutil.Process(pid).environ()
    secrets = environment["TANDEM_CLUSTER_TOKEN"], environment["TANDEM_REDIS_URL"].split("@")[0]
    # Processes that ended meanwhile have None.
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines for secret in secrets if secret in line]
    assert not [secret for secret in secrets if secret in up.screen.read_text()]


def test_every_port_is_on_loopback(up: Up) -> None:
    up.complete()
    listeners = {
        (psutil.Process(pid).name(), c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
        for pid in guardian.cluster_processes(up.cluster_id)
        for c in psutil.Process(pid).net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert set(up.ports.values()) <= {port for _, _, port in listeners}
    assert {address for _, address, _ in listeners} <= {"127.0.0.1", "::1"}, listeners


def test_ray_spares_its_agents_when_memory_is_short(up: Up) -> None:
    """Neither Ray's own memory monitor nor Linux ends them first; what the raylet itself says."""
    (raylet,) = up.pids("raylet/raylet")
    run_folder = Path(psutil.Process(raylet).environ()["RAY_AUTH_TOKEN_PATH"]).parent
    logs = run_folder.glob("ray/session_latest/logs/raylet.*")
    said = "".join(path.read_text() for path in logs)
    assert "ThresholdMemoryMonitor disabled" in said
    agents = up.pids("ray::")  # of Ray's node: a cluster of one machine has no actor
    assert agents
    assert {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in agents} == {
        Path(f"/proc/{up.launcher_pid}/oom_score_adj").read_text()
    }


def test_workers_tell_of_their_hosts_memory(up: Up) -> None:
    total = psutil.virtual_memory().total
    for worker in up.get("/v1/cluster")["workers"]:
        assert 0 < worker["memory_free_bytes"] < worker["memory_total_bytes"] <= total
        with urllib.request.urlopen(f"http://{worker['metrics_address']}/metrics") as reply:
            assert b"\ntandem_memory_free_bytes{" in reply.read()


@pytest.mark.parametrize(
    ("options", "at_fault"),
    [
        (["--kv-memory", "900000000000"], "--kv-memory 900000000000: 2 workers need 2 x (900.0 GB"),
        (["--num-blocks", "90000000"], "--num-blocks 90000000: 2 workers need 2 x ("),
    ],
)
def test_more_memory_than_there_is_is_refused_before_anything_starts(
    options: list[str], at_fault: str
) -> None:
    said = _refusal(options)
    assert f"tandem: {at_fault}" in said
    assert "GB weights) = " in said


def test_a_model_or_an_adapter_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path / "model")
    write_adapter(tmp_path / "adapter", folder.config, r=8)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no weights")
    options = ["--model", str(folder.path), "--lora", f"mine={tmp_path / 'adapter'}"]
    assert "tandem: --lora mine: " in _refusal(options)
    weights = tmp_path / "model" / "model.safetensors"
    tensors = {**load_file(weights), "model.norm.weight": torch.ones(47)}
    weights.unlink()
    save_file(tensors, weights, metadata={"format": "pt"})
    named = f"tandem: {weights}: model.norm.weight has shape [47]; config.json implies [96]"
    assert named in _refusal(options)


def _refusal(options: list[str]) -> str:
    """Returns what `tandem up` says that starts no process."""
    done = subprocess.run(
        command(free_ports(), *options, "--device", "cpu"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "redis" not in done.stdout  # which is started first
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_second_one_on_a_taken_port_says_which_and_what_to_do(up: Up) -> None:
    for option, taken in up.ports.items():
        ports = {**free_ports(), option: taken}
        done = subprocess.run(
            command(ports), cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 1
        assert f"port {taken} of 127.0.0.1 is used by process " in done.stderr
        assert done.stderr.rstrip().endswith(f"with {option}")


def test_scale_and_status_talk_to_it(up: Up) -> None:
    def tandem(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tandem.ops.cli", *arguments, "--url", up.admin_url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    assert tandem("scale", "prefill=2") == "prefill=2\n"
    assert "prefill-1" in tandem("status")
    assert tandem("scale", "prefill=1", "decode=1") == "prefill=1 decode=1\n"
    running = up.pids("tandem.worker --role prefill")
    assert len(running) == 1


def test_faults_of_workers_are_named_by_the_page_the_status_and_a_log(
    up: Up, tmp_path: Path
) -> None:
    """The short form of tests/chaos/test_explained.py."""
    cluster = Faulty(up.admin_url, tmp_path, "prefill-0")
    (router,) = up.pids("--router-id router-0")
    logs = Path(psutil.Process(router).environ()[FILE_VARIABLE]).parent
    surfaces = Surfaces(up.admin_url, [logs, tmp_path], prometheus=None)
    try:
        for fault in (STOPPED, KILLED, WRONG_TOKEN, OTHER_MODEL):
            unnamed = set(report(fault.what, look(cluster, surfaces, fault))) - {"alert"}
            assert not unnamed, (fault.what, surfaces.page.lines(time.time() - 30))
        assert up.complete()
    finally:
        surfaces.close()


NAMED_WITHIN_S = 3.0


def _headline(up: Up) -> str:
    return str(up.get("/v1/cluster")["headline"])


def _shows(up: Up, pattern: str) -> bool:
    return re.search(pattern, up.screen.read_text(), re.M) is not None


def test_the_screen_and_the_status_name_cause_effect_and_remedy_within_3_s(up: Up) -> None:
    tandem = [sys.executable, "-m", "tandem.ops.cli"]
    wait_until(lambda: _headline(up).startswith("All is well"), 60)

    (decode,) = up.pids("tandem.worker --role decode")
    os.kill(decode, signal.SIGKILL)
    wrong = re.compile("silent|lost|All is well")
    seen = []
    wait_until(
        lambda: "ended by SIGKILL" in (seen.append(_headline(up)) or seen[-1]), NAMED_WITHIN_S
    )
    wait_until(
        lambda: _shows(up, r"decode-0: its process was ended by SIGKILL; a new one is started"),
        NAMED_WITHIN_S,
    )
    while not (now := _headline(up)).startswith("All is well"):
        seen.append(now)
        time.sleep(0.2)
    # The first reads may be older than the kill.
    named = seen[next(n for n, text in enumerate(seen) if "SIGKILL" in text) :]
    assert not [text for text in named if wrong.search(text)], named
    assert all("Nothing has to be done" in text for text in named if "decode-0 is loading" in text)
    assert any("Requests are not served." in text for text in named), "no decode worker is left"
    wait_until(lambda: _shows(up, "decode-0 is back"), NAMED_WITHIN_S)

    words = ["scale", "prefill=2", "--url", up.admin_url]
    subprocess.run([*tandem, *words], cwd=ROOT, check=True, timeout=120, capture_output=True)
    assert wait_until(lambda: _shows(up, "the prefill pool is scaled from 1 to 2"), NAMED_WITHIN_S)
    words = ["drain", "prefill-1", "--url", up.admin_url]
    subprocess.run([*tandem, *words], cwd=ROOT, check=True, timeout=120, capture_output=True)
    wait_until(lambda: _shows(up, "prefill-1 has left: it finished its requests"), NAMED_WITHIN_S)
    words = ["scale", "prefill=1", "--url", up.admin_url]
    subprocess.run([*tandem, *words], cwd=ROOT, check=True, timeout=120, capture_output=True)

    (server,) = up.pids("valkey-server")
    os.kill(server, signal.SIGKILL)
    wait_until(
        lambda: _shows(
            up, "Redis ended and is being started again at the same address. Until Redis"
        ),
        NAMED_WITHIN_S,
    )
    wait_until(lambda: _headline(up).startswith("All is well"), 60)


def test_memory_that_grpc_leaks_to_strangers_ends_the_grpc_replica_only(up: Up) -> None:
    """A stranger's headers make gRPC's core keep memory. HTTP goes on, and gRPC comes back."""
    (router,), (replica,) = up.pids("--router-id router-0"), up.pids("--router-id grpc-0")
    # Only the restarts of a process that an agent watches are counted.
    wait_until(lambda: [a["pid"] for a in _grpc_agents(up)] == [replica])
    before_bytes = psutil.Process(router).memory_info().rss
    body = {"model": up.get("/v1/models")["data"][0]["id"], "prompt": "The sky is", "stream": True}
    stream = urllib.request.Request(
        f"{up.url}/v1/completions",
        json.dumps({**body, "max_tokens": 200, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    port = up.ports["--grpc-port"]
    with urllib.request.urlopen(stream, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        with hpack_attack(port, is_over=lambda: not _runs(replica), num_frames_max=4000):
            wait_until(lambda: not _runs(replica))
            assert up.complete()
        assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert up.pids("--router-id router-0") == [router]
    assert psutil.Process(router).memory_info().rss - before_bytes < 32 << 20
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        wait_until(lambda: _finish_reason(channel) == "length")
    (agent,) = wait_until(lambda: [a for a in _grpc_agents(up) if a["starts"]])
    assert agent["id"] == "grpc-0"
    assert "--grpc-memory allows 128" in agent["last_line"]
    assert up.get("/v1/cluster")["pools"]["router"]["wanted"] == 1


def test_redis_is_started_again_where_it_was(up: Up) -> None:
    (server,) = up.pids("valkey-server")
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: up.pids("valkey-server") and up.pids("valkey-server") != [server])
    wait_until(lambda: up.get("/v1/cluster")["redis"] == "ok")
    assert up.complete()


def test_requests_are_served_without_ray_until_there_is_a_fresh_head(up: Up) -> None:
    (gcs,) = up.pids("gcs/gcs_server")
    (decode,) = up.pids("tandem.worker --role decode")
    (prefill,) = up.pids("tandem.worker --role prefill")
    os.kill(gcs, signal.SIGKILL)
    wait_until(lambda: "gcs_server ended" in up.screen.read_text())
    assert up.complete()
    wait_until(lambda: f"{RAY_IS_UP} again" in up.screen.read_text(), 180)
    assert up.pids("tandem.worker --role decode") == [decode]
    assert up.pids("tandem.worker --role prefill") == [prefill]
    os.kill(prefill, signal.SIGKILL)
    # For a moment its starter has the same command line.
    wait_until(lambda: len(set(up.pids("tandem.worker --role prefill")) - {prefill}) == 1)
    assert up.complete()


def test_a_worker_that_dies_before_ray_is_up_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path, "--prefill", "0", "--no-grpc") as up:
        (head,) = wait_until(lambda: up.pids("tandem.cluster.ray.head"))
        os.kill(head, signal.SIGSTOP)
        (killed,) = up.pids("tandem.worker --role decode")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: re.search(r"decode-0 ended.*; the next start is in", _screen(up)))
        wait_until(lambda: up.get("/v1/cluster")["workers"][0]["state"] == "ready")
        assert up.complete()
        (decode,) = up.pids("tandem.worker --role decode")
        os.kill(head, signal.SIGCONT)
        wait_until(lambda: RAY_IS_UP in _screen(up), START_DEADLINE_S)

        def agents() -> list[dict[str, Any]]:
            return up.get("/v1/cluster")["pools"]["decode"].get("agents", [])

        wait_until(lambda: [a["state"] for a in agents()] == ["running"])
        assert [a["pid"] for a in agents()] == [decode], "Ray started one more"


def test_a_file_and_variables_configure_a_cluster_that_needs_a_key(tmp_path: Path) -> None:
    key = "sk-my-own-key"
    file = tmp_path / "tandem.yaml"
    file.write_text("served-model-name: talker\nprefill: 0\nno-grpc: true\nmax-num-seqs: 8\n")
    key_file = tmp_path / "key"
    key_file.write_text(f"{key}\n")
    given = {
        "TANDEM_CONFIG": str(file),
        "TANDEM_MAX_NUM_SEQS": "4",
        "TANDEM_API_KEY": key,
        "TANDEM_PORT": "tcp://10.0.0.1:80",
    }
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1"}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60)

    def tandem(*arguments: str, **more: str) -> str:
        done = run([sys.executable, "-m", "tandem", *arguments], env=environment | more)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    with started(tmp_path, environment=given) as up:
        screen = _screen(up)
        assert "TANDEM_PORT=tcp://10.0.0.1:80 is ignored: Kubernetes sets this variable" in screen
        assert re.search("model +talker", screen)
        for refused in ({}, {"Authorization": "Bearer sk-another-key"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(
                    urllib.request.Request(f"{up.url}/v1/models", headers=refused)
                )
        authorized = urllib.request.Request(
            f"{up.url}/v1/completions",
            json.dumps({"model": "talker", "prompt": "The sky is", "max_tokens": 4}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(authorized, timeout=60) as reply:
            request_id = json.load(reply)["id"]
        assert tandem("chat", "--max-tokens", "4", "Hello!", TANDEM_API_KEY_FILE=str(key_file))
        # The same commands work at the admin address, which needs no key on loopback, and at the
        # public one.
        for url, keys in ((up.admin_url, {}), (up.url, {"TANDEM_API_KEY": key})):
            assert "decoded by decode-0" in tandem("why", request_id, TANDEM_ADMIN_URL=url, **keys)
            usage = partial(tandem, "usage", TANDEM_ADMIN_URL=url, **keys)
            wait_until(lambda usage=usage: " default " in usage())  # type: ignore[misc]
        assert "decoded by decode-0" in tandem("why", request_id)
        (row,) = tandem("ps").splitlines()[1:]
        assert row.split()[:6] == ["talker", "ready", "0", "prefill,", "1", "decode"]
        assert row.split()[6:8] == [up.url, up.admin_url]
        assert row.split()[-1] == str(up.launcher_pid)

        (worker,) = up.pids("tandem.worker --role decode")
        line = psutil.Process(worker).cmdline()
        assert line[line.index("--max-num-seqs") + 1] == "4"
        for pid in guardian.cluster_processes(up.cluster_id):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                assert not given.keys() & process.environ().keys()
                assert key not in " ".join(process.cmdline())
    assert "no cluster is running here" in tandem("ps")


@pytest.mark.slow
def test_a_head_that_starts_slowly_is_awaited(tmp_path: Path) -> None:
    """Ray itself would give up after 30 s."""
    with started(tmp_path, "--prefill", "0", "--no-grpc") as up:
        (raylet,) = wait_until(lambda: up.pids("raylet/raylet"))
        os.kill(raylet, signal.SIGSTOP)
        time.sleep(40)
        os.kill(raylet, signal.SIGCONT)
        wait_until(lambda: RAY_IS_UP in _screen(up), START_DEADLINE_S)
        assert "Ray is not up after 30 s" in _screen(up)
        assert up.pids("raylet/raylet") == [raylet]


def test_nothing_is_left_when_the_parent_is_killed(up: Up) -> None:
    assert up.pids("valkey-server")
    up.parent.kill()
    wait_until(lambda: not _runs(up.launcher_pid), 60)
    wait_until(lambda: not guardian.cluster_processes(up.cluster_id), 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_launcher_ends_in_the_middle_of_its_start(
    number: signal.Signals, tmp_path: Path
) -> None:
    screen = tmp_path / "screen"
    with screen.open("wb") as out:
        launcher = subprocess.Popen(
            command(free_ports()),
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
    ids: list[str] = []
    try:
        (folder,) = wait_until(lambda: list(tmp_path.glob("tandem-*/processes")))
        (record, *_) = wait_until(lambda: list(folder.glob("*.json")))
        worker = psutil.Process(json.loads(record.read_text())["pid"])
        ids.append(worker.environ()["TANDEM_CLUSTER_ID"])
        launcher.send_signal(number)
        launcher.wait(30)
        wait_until(lambda: not guardian.cluster_processes(ids[0]), 30)
        wait_until(lambda: not list(tmp_path.glob("tandem-*")), 30)
    finally:
        launcher.kill()
        launcher.wait()
        for cluster_id in ids:
            guardian.end_cluster(cluster_id, 0)
