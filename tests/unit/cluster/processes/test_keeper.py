"""A keeper of a new controller or agent: what it starts, adopts, and leaves alone. What is known of
the process is in the run folder."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.gpus import VISIBLE
from tandem.cluster.pools import ClusterSpec, Member, MemberState, PoolCommand
from tandem.cluster.processes import leave_node, process
from tandem.cluster.processes.keeper import Keepers, Report
from tandem.cluster.processes.owned import Owned
from tandem.cluster.ray.agent import Agent
from tandem.common.config.cluster import LEAVE_SIGNAL, RUN_FOLDER_VARIABLE

WAIT = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
MEMBER = Member(member_id="decode-0", pool="decode", ordinal=3)  # as it was at its first start


class Kept:
    """A member with its keeper."""

    def __init__(self, spec: ClusterSpec, member: Member) -> None:
        self.last = Report(member.keeper_name, "pending")
        self.keepers = Keepers(spec, self._take)
        self.keepers.keep(member)

    def _take(self, report: Report) -> None:
        assert report.keeper_name == self.last.keeper_name
        self.last = report

    def until(self, state: MemberState, *, not_pid: int = -1) -> tuple[int, int]:
        """Waits until the keeper reports its process in that state, and returns (pid, starts)."""
        give_up_at = time.monotonic() + 30
        while self.last.state != state or self.last.pid == not_pid:
            assert time.monotonic() < give_up_at, self.last
            time.sleep(0.01)
        return self.last.pid, self.last.num_starts

    def end(self) -> None:
        self.keepers.drain(self.last.keeper_name)
        self.until("gone")


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    return ClusterSpec(
        cluster_id="c",
        run_folder=str(tmp_path),
        pools={"decode": PoolCommand(WAIT)},
        wanted={"decode": 1},
        cores=[],
        drain_deadline_s=10.0,
    )


def write(folder: Path, *states: MemberState) -> None:
    """Writes the controller's state: one member for each state, `MEMBER` first."""
    members = [
        Member(member_id=f"decode-{n}", pool="decode", ordinal=3 + n, state=state)
        for n, state in enumerate(states)
    ]
    Owned({"decode": 1}, members).write(folder)


@pytest.mark.parametrize("states", [["draining", "running"], []])
def test_one_on_its_way_out_or_forgotten_is_not_started(
    spec: ClusterSpec, tmp_path: Path, states: list[MemberState]
) -> None:
    write(tmp_path, *states)
    assert Kept(spec, MEMBER).until("gone") == (0, 0)
    assert not (tmp_path / "processes").exists()


def test_one_that_still_runs_on_its_way_out_is_ended(spec: ClusterSpec, tmp_path: Path) -> None:
    left = process.start("decode-0", WAIT, tmp_path, os.environ)
    write(tmp_path, "draining")
    assert Kept(spec, MEMBER).until("gone") == (0, 0)
    assert left.wait(0)
    left.close()


def test_one_that_ended_when_nobody_could_tell_its_keeper_is_not_started_again(
    spec: ClusterSpec, tmp_path: Path
) -> None:
    write(tmp_path, "running")
    kept = Kept(spec, MEMBER)
    kept.until("running")
    write(tmp_path, "draining")
    running = process.find("decode-0", tmp_path)
    assert running is not None
    running.stop(10)
    running.close()
    assert kept.until("gone") == (0, 1)


def test_on_a_node_that_is_about_to_end_a_process_drains_and_its_agent_stays(
    spec: ClusterSpec, tmp_path: Path
) -> None:
    spec = msgspec.structs.replace(spec, on_nodes=True)
    kept = Kept(spec, MEMBER)
    pid, _ = kept.until("running")
    assert leave_node.leave(tmp_path, 10.0) == []
    assert kept.until("draining", not_pid=pid) == (0, 0)
    # A new one, or one that is placed there by mistake, starts nothing.
    again = Kept(spec, msgspec.structs.replace(MEMBER, member_id="decode-1"))
    assert again.until("draining") == (0, 0)
    assert process.find_all(tmp_path) == []


def test_a_node_that_ends_waits_for_its_processes_until_the_deadline(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: signal.pause()"
    running = process.start("deaf", [sys.executable, "-S", "-c", deaf], tmp_path, os.environ)
    try:
        wait_until_it_is_deaf(running.pid)
        assert leave_node.leave(tmp_path, 0.2) == ["deaf"]
        assert not running.wait(0)
    finally:
        running.stop(0)
        running.close()
    assert leave_node.leave(tmp_path, 10.0) == []


def test_a_prepared_run_folder_ends_no_foreign_process(
    spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default folder of a node has a name that a local user can take before."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    for take in (
        lambda: leave_node.leave(folder, 10.0),
        lambda: Agent(msgspec.structs.replace(spec, on_nodes=True), MEMBER),
    ):
        with pytest.raises(PermissionError, match="prepared belongs to user"):
            take()
    assert not list(folder.iterdir())


def wait_until_it_is_deaf(pid: int) -> None:
    """Waits until a process ignores SIGTERM."""
    give_up_at = time.monotonic() + 30
    while True:
        (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        if int(ignored, 16) >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_router_of_several_hosts_is_told_before_it_ends(
    spec: ClusterSpec, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    script = (
        "import signal, sys\n"
        "def say(number, _): open(sys.argv[1], 'a').write(f'{number} ')\n"
        "signal.signal(signal.SIGUSR1, say)\n"
        "signal.signal(signal.SIGTERM, lambda *found: (say(*found), sys.exit()))\n"
        "say(0, None)\n"
        "while True: signal.pause()"
    )
    command = PoolCommand([sys.executable, "-S", "-c", script, str(said)])
    spec = msgspec.structs.replace(spec, pools={"router": command}, leave_notice_s=0.5)
    kept = Kept(spec, Member(member_id="router-1", pool="router", ordinal=3, host="h"))
    give_up_at = time.monotonic() + 30
    while not said.exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    kept.end()
    assert said.read_text().split() == ["0", str(LEAVE_SIGNAL.value), str(signal.SIGTERM.value)]


def test_a_worker_sees_only_its_gpu(
    spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    script = (
        "import os, signal, sys\n"
        "with open(sys.argv[1] + '.new', 'w') as file: file.write(os.environ[sys.argv[2]])\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "signal.pause()"
    )
    command = PoolCommand([sys.executable, "-S", "-c", script, str(said), VISIBLE], device="cuda")
    monkeypatch.setenv(VISIBLE, "4,GPU-5b1f,6")
    spec = msgspec.structs.replace(spec, pools={"decode": command})
    kept = Kept(spec, msgspec.structs.replace(MEMBER, gpus=[1]))
    give_up_at = time.monotonic() + 30
    while not said.exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert said.read_text() == "GPU-5b1f"
    kept.end()


@pytest.mark.parametrize("is_written", [False, True])
def test_one_that_is_wanted_is_started_and_started_again(
    spec: ClusterSpec, tmp_path: Path, is_written: bool
) -> None:
    if is_written:
        write(tmp_path, "running", "draining")
    kept = Kept(spec, MEMBER)
    first, _ = kept.until("running")
    os.kill(first, 9)
    _, num_starts = kept.until("running", not_pid=first)
    assert num_starts == (2 if is_written else 1), "the first start of all is none after an end"
    kept.end()


def test_what_an_earlier_keeper_has_reported_stays_known(spec: ClusterSpec, tmp_path: Path) -> None:
    write(tmp_path, "running")
    again = msgspec.structs.replace(MEMBER, state="running", num_starts=7, ending="exit status 1")
    kept = Kept(spec, again)
    assert kept.until("running")[1] == 8
    assert kept.last.ending == "exit status 1"
    kept.end()
