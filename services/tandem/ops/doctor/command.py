"""`tandem doctor`: a line for each check of this host. It changes nothing.

Each check reads files below a root, so that tests give it other hosts. A lack never stops Tandem:
exit status 0 in any case.
"""

from collections.abc import Callable

from tandem.common.process.progress import Step, Waiting
from tandem.ops.doctor.clocks import clock, time_sync
from tandem.ops.doctor.devices import gpus, memory_reads, nixl, rdma
from tandem.ops.doctor.host import Finding, Host
from tandem.ops.doctor.redis import redis
from tandem.ops.doctor.system import (
    huge_pages,
    kernel,
    memlock,
    memory,
    model_disk,
    open_files,
    run_disk,
    shared_memory,
)

CHECKS: tuple[Callable[[Host], Finding], ...] = (
    *(kernel, memory, huge_pages, shared_memory, open_files, memlock),
    *(model_disk, run_disk, clock, time_sync),
    *(gpus, nixl, memory_reads, rdma, redis),
)


def main() -> None:
    """Prints a line for each check, with what a lack costs and what to do about it."""
    findings = []
    with Waiting() as waiting:
        for number, check in enumerate(CHECKS):
            waiting.show(Step("checks", check.__name__.replace("_", " "), number, len(CHECKS)))
            findings.append(check(Host()))
    for finding in findings:
        verdict = "!" if finding.cost else "ok"
        print(f"{verdict:2}  {finding.name:<12} {finding.found}")
        if finding.cost:
            print(f"{'':4}{'':12} costs: {finding.cost}")
            print(f"{'':4}{'':12} to do: {finding.remedy}")
    num_lacks = sum(bool(finding.cost) for finding in findings)
    print(f"{num_lacks} of {len(findings)} checks found a lack; Tandem runs all the same")
