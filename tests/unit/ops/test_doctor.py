"""The checks of `tandem doctor` on hosts made of files, and the command on this one."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.common import cuda_build
from tandem.ops.doctor import clocks, command, devices, system
from tandem.ops.doctor.command import CHECKS, redis
from tandem.ops.doctor.host import HostFiles
from tandem.router.workers.troubles import is_disk_full
from tests.harness.documents import ROOT
from tests.harness.terminal import Terminal

RDMA = {
    "dev/infiniband/uverbs0": "",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
}
CARD = {
    "dev/nvidiactl": "",
    "dev/nvidia0": "",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\n"
        "GCC version:  gcc version 13.3.0\n"
    ),
    "proc/driver/nvidia/gpus/0000:65:00.0/information": (
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 185\n"
    ),
}


def host(root: Path, files: dict[str, str], **environment: str) -> HostFiles:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostFiles(root, environment)


@pytest.mark.parametrize(
    ("check", "file", "good", "bad"),
    [
        (system.kernel, "proc/sys/kernel/osrelease", "6.1.0-13-amd64\n", "4.18.0-553.el8\n"),
        (
            system.huge_pages,
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always [madvise] never",
            "always madvise [never]",
        ),
        (
            system.shared_huge_pages,
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always within_size [advise] never deny force",
            "always within_size advise [never] deny force",
        ),
        (
            clocks.clock,
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
            "tsc",
            "hpet",
        ),
        (devices.memory_reads, "proc/sys/kernel/yama/ptrace_scope", "0", "3"),
    ],
)
def test_a_lack_has_a_cost_and_a_remedy_and_what_is_well_has_none(
    check: Any, file: str, good: str, bad: str, tmp_path: Path
) -> None:
    well, lack = (
        check(host(tmp_path / name, {file: text})) for name, text in (("good", good), ("bad", bad))
    )
    assert (well.cost, well.remedy) == ("", "")
    assert lack.cost
    assert lack.remedy


def test_the_nixl_that_pulls_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12")
    versions = {"nixl_cu12": "1.5.1", "libucx-cu12": "1.19.0"}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: versions.get(name, ""))
    here = host(tmp_path, {}, UCX_TLS="tcp")
    assert devices.nixl(here).found == "nixl_cu12 1.5.1 with UCX 1.19.0, UCX_TLS=tcp"
    assert not devices.nixl(here).cost
    versions["nixl_cu12"] = "1.4.0"
    assert devices.nixl(here).remedy == "pip install 'nixl_cu12>=1.5'"


@pytest.mark.parametrize(
    ("torch", "installed", "gpu", "remedy"),
    [
        ("2.13.0+cu130", ("nixl_cu12",), True, "pip install nixl-cu13"),
        ("2.13.0+cu128", ("nixl_cu13",), True, "pip install nixl-cu12"),
        ("2.13.0+cu130", ("nixl_cu12", "nixl_cu13"), True, ""),
        ("2.13.0+cu128", ("nixl_cu12", "nixl_cu13"), True, ""),
        ("2.13.0+cu130", ("nixl_cu12",), False, ""),
        ("2.13.0+cu130", ("nixl",), True, ""),  # it loads the other packages itself
        ("2.13.0+cpu", ("nixl_cu12",), True, ""),  # the line about the GPU says so
    ],
)
def test_nixl_is_built_for_the_cuda_of_pytorch(
    torch: str,
    installed: tuple[str, ...],
    gpu: bool,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = dict.fromkeys(installed, "1.5.1") | {"torch": torch}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(devices, "find_spec", lambda name: object() if name in installed else None)
    finding = devices.nixl(host(tmp_path, CARD if gpu else {}))
    assert finding.remedy == remedy
    assert ("NIXL is built for CUDA" in finding.cost) == bool(remedy)
    loaded = "nixl_cu13" if torch == "2.13.0+cu130" and "nixl_cu13" in installed else installed[0]
    assert finding.found.startswith(f"{loaded} 1.5.1")


@pytest.mark.parametrize(
    ("limits", "cost"),
    [
        ((1024, 20_000), ""),  # a router raises its own limit as far as it may
        ((1024, 1024), "a router accepts 384 connections instead of 4096"),
        ((1024, resource.RLIM_INFINITY), ""),
    ],
)
def test_open_files_are_what_a_router_may_raise_them_to(
    limits: tuple[int, int], cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert system.open_files(HostFiles(tmp_path)).cost == cost


@pytest.mark.parametrize(
    ("limit", "files", "found", "costs"),
    [
        (8 << 20, {}, "8.4 MB", False),  # without RDMA nothing is pinned
        (8 << 20, RDMA, "8.4 MB", True),
        (1 << 60, RDMA, "1152921504606.8 MB", False),
        (resource.RLIM_INFINITY, RDMA, "unlimited", False),
        (
            8 << 20,
            RDMA | {"proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000\n"},
            "unlimited, because the process has the capability IPC_LOCK",
            False,
        ),
        (8 << 20, RDMA | {"proc/self/status": "CapEff:\t0000000000000400\n"}, "8.4 MB", True),
    ],
)
def test_locked_memory_is_limited_where_there_is_rdma(
    limit: int,
    files: dict[str, str],
    found: str,
    costs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = system.memlock(host(tmp_path, files))
    assert finding.found == found
    assert bool(finding.cost) == bool(finding.remedy) == costs


@pytest.mark.parametrize(
    ("status", "files", "environment", "found", "costs"),
    [
        (0x2001, {}, {}, "the kernel's clock is synchronized", False),
        (0x40, {}, {}, "not synchronized", True),
        (
            0x40,
            {"run/systemd/timesync/synchronized": ""},
            {},
            "synchronized by systemd-timesyncd",
            False,
        ),
        (0x40, {"run/chrony/chronyd.pid": "7"}, {}, "unknown: chrony runs", False),
        (0x40, {".dockerenv": ""}, {}, "unknown: it is not visible", False),
        (0x40, {}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "unknown: it is not visible", False),
        (0x2001, {".dockerenv": ""}, {}, "the kernel's clock is synchronized", False),
        (None, {}, {}, "unknown: it is not visible", False),
    ],
)
def test_a_clock_that_nothing_sets_drifts(
    status: int | None,
    files: dict[str, str],
    environment: dict[str, str],
    found: str,
    costs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks, "kernel_clock_status", lambda: status)
    finding = clocks.time_sync(host(tmp_path, files, **environment))
    assert finding.found.startswith(found)
    assert bool(finding.cost) == costs
    assert ("more than 5 s" in finding.cost) == costs


def test_the_kernel_tells_the_clocks_status_without_rights() -> None:
    status = clocks.kernel_clock_status()
    assert status is None or status >= 0


@pytest.mark.parametrize("check", [system.model_disk, system.run_disk])
@pytest.mark.parametrize(
    ("free", "total"), [(10 << 20, 1 << 30), (1 << 30, 100 << 30), (1 << 29, 1 << 40)]
)
def test_a_disk_is_full_as_it_is_for_routers(
    check: Any, free: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TANDEM_CACHE_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "not" / "made"))
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=free, total=total)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    finding = check(HostFiles(tmp_path))
    assert tmp_path in asked
    assert bool(finding.cost) == bool(finding.remedy) == is_disk_full(free, total)


def test_the_fullest_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    free = {tmp_path: 0}
    total = 100 << 30
    monkeypatch.setattr(
        shutil, "disk_usage", lambda at: SimpleNamespace(free=free.get(at, total), total=total)
    )
    assert system.run_disk(HostFiles()).found == f"0 of 107 GB free in {tmp_path}/tandem/runs"


@pytest.mark.parametrize(
    ("torch", "cost"),
    [
        ("2.13.0+cu128", ""),
        ("2.13.0+cu130", "PyTorch is built for CUDA 13, which needs driver 580: no GPU is used"),
        ("2.13.0+cpu", "PyTorch is built for CPUs: no GPU is used"),
        ("2.13.0", ""),
        ("", ""),
    ],
)
def test_gpus_are_counted_and_pytorch_can_use_them(
    torch: str, cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": torch}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: versions.get(name, ""))
    finding = devices.gpus(host(tmp_path, CARD))
    assert finding.found == "1 x NVIDIA H100 80GB HBM3, driver 570.86.15"
    assert (finding.cost, bool(finding.remedy)) == (cost, bool(cost))
    if torch == "2.13.0":  # PyPI's
        versions["nvidia-cuda-runtime"] = "13.0.96"
        assert "driver 580" in devices.gpus(host(tmp_path, CARD)).cost


def test_a_driver_without_a_gpu_is_a_container_without_one(tmp_path: Path) -> None:
    only = {
        "proc/driver/nvidia/version": (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC"
        )
    }
    finding = devices.gpus(host(tmp_path, only))
    assert finding.found == "none, driver 535.129.03"
    assert "container" in finding.cost


def on_pci(root: Path, number: int, driver: str = "nvidia", kind: str = "0x030200") -> None:
    """Adds PCI devices with a driver to the host, as every container of it sees them in /sys."""
    folder = root / "sys/bus/pci/devices"
    for _ in range(number):
        device = folder / f"0000:{len(list(folder.glob('*'))):02x}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")


def test_gpus_of_other_containers_are_not_read_by_cuda_ipc(tmp_path: Path) -> None:
    here = host(tmp_path, CARD)
    on_pci(tmp_path, 1)
    on_pci(tmp_path, 4, kind="0x068000")  # NVSwitches
    on_pci(tmp_path, 2, driver="vfio-pci")  # of virtual machines
    on_pci(tmp_path, 1, driver="")
    assert devices.cuda_ipc(here).found == "all GPUs of this machine are visible"
    assert not devices.cuda_ipc(here).cost
    on_pci(tmp_path, 7)
    finding = devices.cuda_ipc(here)
    assert finding.found == "1 of 8 GPUs of this machine are visible"
    assert "over RDMA, or else over gRPC" in finding.cost
    assert "one container" in finding.remedy


def test_a_host_without_a_gpu_lacks_no_cuda_ipc(tmp_path: Path) -> None:
    on_pci(tmp_path, 2)  # the machine's; this container has none
    finding = devices.cuda_ipc(HostFiles(tmp_path))
    assert (finding.found, finding.cost) == ("no GPU", "")


def test_devices_that_there_are_cost_nothing(tmp_path: Path) -> None:
    assert devices.gpus(host(tmp_path, {})).found == "none"
    assert devices.gpus(host(tmp_path, {})).cost
    assert devices.rdma(host(tmp_path, {})).cost
    assert system.shared_memory(host(tmp_path, {})).cost
    assert not devices.rdma(host(tmp_path, RDMA)).cost


def test_ucx_that_may_not_read_memory_costs_as_a_kernel_that_forbids_it(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/yama/ptrace_scope": "0"}
    assert devices.memory_reads(host(tmp_path, files, UCX_TLS="tcp")).cost


def test_redis_that_does_not_answer_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.ops.doctor.command._REDIS_DEADLINE_S", 0.0)
    assert not redis(HostFiles(tmp_path, {})).cost
    for url in ("redis://:a-secret@127.0.0.1:1/0", "http://:a-secret@127.0.0.1"):
        finding = redis(HostFiles(tmp_path, {"TANDEM_REDIS_URL": url}))
        assert finding.cost
        assert "a-secret" not in str(finding)


def test_the_command_tells_of_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal() as terminal:
        command.main()
    assert "checks" in terminal.text
    told = capsys.readouterr().out.splitlines()
    assert sum(not line.startswith(" ") for line in told) == len(CHECKS) + 1
    assert sum("effect: " in line for line in told) == sum("remedy: " in line for line in told)
    assert f"of {len(CHECKS)} checks found a problem" in told[-1]


def test_the_page_lists_the_checks_in_their_order() -> None:
    table = (ROOT / "docs" / "operations.md").read_text().partition("| check | problem |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in row.split("|")[1].strip().split(", ")]
    assert listed == [check(HostFiles()).name for check in CHECKS]
