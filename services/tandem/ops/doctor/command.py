"""`tandem doctor`: prints one line for each check of this host, without changing the host.

Checks read files below a root folder, so tests can simulate other hosts. Tandem runs in spite of
any problem that a check finds, so the exit status is always 0.
"""

import time
from collections.abc import Callable

from tandem.common.config.cluster import REDIS_URL_VARIABLE
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import ConfigError
from tandem.ops.doctor.clocks import clock, time_sync
from tandem.ops.doctor.devices import cuda_ipc, gpus, kernels, memory_reads, nixl, rdma
from tandem.ops.doctor.host import Finding, HostFiles
from tandem.ops.doctor.system import (
    huge_pages,
    kernel,
    memlock,
    memory,
    model_disk,
    open_files,
    run_disk,
    shared_huge_pages,
    shared_memory,
)

_REDIS_DEADLINE_S = 2.0


def redis(host: HostFiles) -> Finding:
    """Checks that Redis answers. The finding does not contain the password."""
    from tandem.net.store.client import wait_until_answers

    url = host.environment.get(REDIS_URL_VARIABLE)
    if not url:
        return Finding("Redis", f"not checked: {REDIS_URL_VARIABLE} is not set")
    asked_at = time.monotonic()
    try:
        wait_until_answers(url, _REDIS_DEADLINE_S)
    except ConfigError as error:
        cost = "workers and routers cannot start; running routers choose workers by load alone"
        remedy = f"check the server, the network and {REDIS_URL_VARIABLE}"
        return Finding("Redis", error.message, cost, remedy)
    return Finding("Redis", f"answers in {(time.monotonic() - asked_at) * 1e3:.0f} ms")


CHECKS: tuple[Callable[[HostFiles], Finding], ...] = (
    *(kernel, memory, huge_pages, shared_huge_pages, shared_memory, open_files, memlock),
    *(model_disk, run_disk, clock, time_sync),
    *(kernels, gpus, nixl, cuda_ipc, memory_reads, rdma, redis),
)


def main() -> None:
    """Runs all checks. Prints one line for each check, and the effect and a remedy for each
    problem."""
    findings = []
    with Waiting() as waiting:
        for number, check in enumerate(CHECKS):
            waiting.show(
                ProgressRow("checks", check.__name__.replace("_", " "), number, len(CHECKS))
            )
            findings.append(check(HostFiles()))
    for finding in findings:
        verdict = "!" if finding.cost else "ok"
        print(f"{verdict:2}  {finding.name:<12} {finding.found}")
        if finding.cost:
            print(f"{'':4}{'':12} effect: {finding.cost}")
            print(f"{'':4}{'':12} remedy: {finding.remedy}")
    num_lacks = sum(bool(finding.cost) for finding in findings)
    print(f"{num_lacks} of {len(findings)} checks found a problem")
