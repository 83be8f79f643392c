"""The checks of `tandem doctor` on hosts made of files, and the command on this one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tandem import doctor
from tandem.doctor import CHECKS, Host


def host(root: Path, files: dict[str, str], **environment: str) -> Host:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root, environment)


@pytest.mark.parametrize(
    ("check", "file", "good", "bad"),
    [
        (doctor.kernel, "proc/sys/kernel/osrelease", "6.1.0-13-amd64\n", "4.18.0-553.el8\n"),
        (
            doctor.huge_pages,
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never",
            "always madvise [never]",
        ),
        (
            doctor.clock,
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
            "tsc",
            "hpet",
        ),
        (doctor.memory_reads, "proc/sys/kernel/yama/ptrace_scope", "0", "3"),
    ],
)
def test_a_lack_has_a_cost_and_what_is_well_has_none(
    check: object, file: str, good: str, bad: str, tmp_path: Path
) -> None:
    assert callable(check)
    assert not check(host(tmp_path / "good", {file: good})).cost
    assert check(host(tmp_path / "bad", {file: bad})).cost


def test_the_nixl_that_pulls_use_is_found(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    assert doctor.nixl(host(tmp_path, {}, UCX_TLS="tcp")).found == "nixl_cu12, UCX_TLS=tcp"


@pytest.mark.parametrize(
    ("limits", "cost"),
    [
        ((1024, 20_000), ""),  # a router raises its own limit as far as it may
        ((1024, 1024), "a router takes 384 connections, not 4096; 8448 files are enough"),
        ((1024, resource.RLIM_INFINITY), ""),
    ],
)
def test_open_files_are_what_a_router_may_raise_them_to(
    limits: tuple[int, int], cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert doctor.open_files(Host(tmp_path)).cost == cost


def test_devices_that_there_are_cost_nothing(tmp_path: Path) -> None:
    assert doctor.gpus(host(tmp_path, {})).cost
    assert doctor.rdma(host(tmp_path, {})).cost
    assert doctor.shared_memory(host(tmp_path, {})).cost
    assert not doctor.gpus(host(tmp_path, {"dev/nvidiactl": ""})).cost


def test_ucx_that_may_not_read_memory_costs_as_a_kernel_that_forbids_it(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/yama/ptrace_scope": "0"}
    assert doctor.memory_reads(host(tmp_path, files, UCX_TLS="tcp")).cost


def test_the_command_tells_of_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main()
    told = capsys.readouterr().out.splitlines()
    assert sum(not line.startswith(" ") for line in told) == len(CHECKS) + 1
    assert f"of {len(CHECKS)} checks found a lack" in told[-1]
