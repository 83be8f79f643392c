from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tandem.net.rpc.convert import to_message, to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.nixl.reach import HostIdentity, Reach, host_identity, reach
from tandem.transfer.nixl.ucx_mode import UcxMode

LOCAL = HostIdentity("a", "pid:[1]", uid=0, cma=True, rdma=False, ipc_namespace="ipc:[1]")


def test_one_machine_one_namespace_and_one_user_read_each_others_memory() -> None:
    assert reach(LOCAL, LOCAL) is Reach.MEMORY


@pytest.mark.parametrize(
    "other",
    [
        replace(LOCAL, boot_id="b"),
        replace(LOCAL, pid_namespace="pid:[2]"),
        replace(LOCAL, ipc_namespace="ipc:[2]"),
        replace(LOCAL, uid=1000),
        replace(LOCAL, cma=False),
    ],
)
def test_a_single_difference_leaves_grpc_or_rdma(other: HostIdentity) -> None:
    assert reach(LOCAL, other) is reach(other, LOCAL) is Reach.NOTHING
    with_rdma = replace(LOCAL, rdma=True)
    assert reach(with_rdma, other) is Reach.NOTHING, "RDMA needs a port on both sides"
    assert reach(with_rdma, replace(other, rdma=True)) is Reach.RDMA


def test_plain_tcp_is_used_where_both_sides_allow_it_and_nothing_else_is_there() -> None:
    ours, theirs = replace(LOCAL, tcp=True), replace(LOCAL, tcp=True, boot_id="b")
    assert reach(ours, theirs) is Reach.TCP
    assert reach(ours, replace(theirs, boot_id="a")) is Reach.MEMORY
    assert reach(replace(ours, rdma=True), replace(theirs, rdma=True)) is Reach.RDMA
    assert reach(ours, replace(theirs, tcp=False)) is Reach.NOTHING


ONE_GPU = replace(LOCAL, gpus=("nvidia3",))


@pytest.mark.parametrize(
    ("theirs", "memory", "expected"),
    [
        (replace(ONE_GPU, gpus=("nvidia0",)), "VRAM", Reach.HIDDEN_GPU),
        # Pods of one node with a GPU each usually have their own namespaces, too.
        (replace(ONE_GPU, gpus=("nvidia0",), pid_namespace="pid:[2]"), "VRAM", Reach.HIDDEN_GPU),
        (replace(ONE_GPU, gpus=("nvidia0",)), "DRAM", Reach.MEMORY),
        (replace(ONE_GPU, gpus=("nvidia0", "nvidia3")), "VRAM", Reach.MEMORY),
        (ONE_GPU, "VRAM", Reach.MEMORY),
        (replace(ONE_GPU, gpus=()), "VRAM", Reach.MEMORY),  # an older version
        (replace(ONE_GPU, gpus=("nvidia0",), boot_id="b"), "VRAM", Reach.NOTHING),
    ],
)
def test_a_gpu_that_a_container_does_not_have_cannot_be_read(
    theirs: HostIdentity, memory: str, expected: Reach
) -> None:
    assert reach(ONE_GPU, theirs, memory) is reach(theirs, ONE_GPU, memory) is expected


def test_a_hidden_gpu_is_read_over_rdma() -> None:
    ours, theirs = replace(ONE_GPU, rdma=True), replace(ONE_GPU, rdma=True, gpus=("nvidia0",))
    assert reach(ours, theirs, "VRAM") is Reach.RDMA


def test_a_mode_belongs_to_an_agent_so_two_modes_never_meet() -> None:
    assert reach(LOCAL, replace(LOCAL, rdma=True)) is Reach.NOTHING
    assert reach(replace(LOCAL, rdma=True), replace(LOCAL, rdma=True)) is Reach.RDMA


def test_an_older_version_does_not_tell_its_ipc_namespace() -> None:
    assert reach(LOCAL, replace(LOCAL, ipc_namespace="")) is Reach.MEMORY


def test_a_process_that_does_not_know_its_machine_shares_it_with_nobody() -> None:
    unknown = replace(LOCAL, boot_id="")
    assert reach(unknown, unknown) is Reach.NOTHING


def test_this_process_knows_its_machine() -> None:
    identity = host_identity(environment={})
    assert identity.ipc_namespace.startswith("ipc:[")
    assert len(identity.boot_id) == 36
    assert identity.pid_namespace.startswith("pid:[")
    assert identity.uid == os.getuid()
    assert reach(identity, host_identity(environment={})) in (Reach.MEMORY, Reach.NOTHING)
    assert not identity.tcp
    assert host_identity("insecure", environment={}).mode is UcxMode.TCP
    assert not host_identity("insecure", environment={"UCX_TLS": "rc,sm"}).tcp


@dataclass(frozen=True)
class Machine:
    """A folder that looks like a machine's proc and sys."""

    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def identity(self, **environment: str) -> HostIdentity:
        return host_identity(root=self.root, environment=environment)


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
    assert not machine.identity().rdma, "the node has a port, this container has no device"
    machine.write("dev/infiniband/uverbs0", "")
    assert machine.identity().rdma
    assert machine.identity().mode is UcxMode.RDMA


def test_the_gpus_of_a_container_are_its_devices(machine: Machine) -> None:
    assert machine.identity().gpus == ()
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1"):
        machine.write(f"dev/{name}", "")
    assert machine.identity().gpus == ("nvidia10", "nvidia3")


def test_the_gpus_travel_to_the_peer() -> None:
    sent = to_struct(HostIdentity, to_message(pb.HostIdentity, ONE_GPU))
    assert list(sent.gpus) == ["nvidia3"]
    assert to_struct(HostIdentity, pb.HostIdentity(boot_id="a")).gpus == []


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
    machine.write("dev/infiniband/uverbs0", "")
    identity = machine.identity(UCX_TLS=ucx_tls)
    assert (identity.cma, identity.rdma) == (cma, rdma)
