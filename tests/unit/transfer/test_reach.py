from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.transfer.reach import HostIdentity, Reach, host_identity, reach

HERE = HostIdentity(boot_id="a", pid_namespace="pid:[1]", uid=0, cma=True, rdma=False)


def test_one_machine_one_namespace_and_one_user_read_each_others_memory() -> None:
    assert reach(HERE, HERE) is Reach.MEMORY


@pytest.mark.parametrize(
    "other",
    [
        replace(HERE, boot_id="b"),
        replace(HERE, pid_namespace="pid:[2]"),
        replace(HERE, uid=1000),
        replace(HERE, cma=False),
    ],
)
def test_a_single_difference_leaves_tcp_or_rdma(other: HostIdentity) -> None:
    assert reach(HERE, other) is reach(other, HERE) is Reach.TCP
    with_rdma = replace(HERE, rdma=True)
    assert reach(with_rdma, other) is Reach.TCP, "RDMA needs a port on both sides"
    assert reach(with_rdma, replace(other, rdma=True)) is Reach.RDMA


def test_who_does_not_know_its_machine_is_nobodys_neighbour() -> None:
    unknown = replace(HERE, boot_id="")
    assert reach(unknown, unknown) is Reach.TCP


def test_this_process_knows_its_machine() -> None:
    identity = host_identity(environment={})
    assert len(identity.boot_id) == 36
    assert identity.pid_namespace.startswith("pid:[")
    assert identity.uid == os.getuid()
    assert reach(identity, host_identity(environment={})) in (Reach.MEMORY, Reach.TCP)


@dataclass(frozen=True)
class Machine:
    """A folder that looks like a machine's proc and sys."""

    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def identity(self, **environment: str) -> HostIdentity:
        return host_identity(self.root, environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("scope", "capabilities", "allowed"),
    [
        ("0", "0000000000000000", True),
        ("1", "0000000000000000", True),
        ("2", "0000000000000000", False),
        ("2", "0000000000080000", True),
        ("3", "0000000000080000", False),
    ],
)
def test_the_kernels_ptrace_scope_decides_on_reads_of_memory(
    machine: Machine, scope: str, capabilities: str, allowed: bool
) -> None:
    machine.write("proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    machine.write("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    assert machine.identity().cma is allowed


def test_an_rdma_port_counts_when_it_is_active(machine: Machine) -> None:
    assert not machine.identity().rdma
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert not machine.identity().rdma
    machine.write("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n")
    assert machine.identity().rdma


@pytest.mark.parametrize(
    ("ucx_tls", "cma", "rdma"),
    [
        ("all", True, True),
        ("tcp", False, False),
        ("tcp,shm,self", True, False),
        ("rc,ud,self", False, True),
        ("^cma", False, True),
        ("^tcp", True, True),
    ],
)
def test_what_ucx_is_told_to_use_counts(
    machine: Machine, ucx_tls: str, cma: bool, rdma: bool
) -> None:
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    identity = machine.identity(UCX_TLS=ucx_tls)
    assert (identity.cma, identity.rdma) == (cma, rdma)
