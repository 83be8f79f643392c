"""Gives each rank cores of its own, because ranks wait for each other many times in a step."""

import os

from tandem.common.config.engine import EngineConfig
from tandem.common.process.numa import by_node


def pin_to_share(config: EngineConfig, rank: int) -> None:
    """Pins the calling thread, and the threads that it starts, to the rank's share of the process's
    cores. Ranks get cores in the order of the NUMA nodes, so most ranks are in one node.

    Does nothing unless the process has exactly one core for each thread of all ranks, as a worker
    with the option --cores has: other processes may use the cores, and the system then moves the
    threads better.
    """
    cores = [core for node in by_node(os.sched_getaffinity(0)) for core in node]
    num = config.num_threads
    if len(cores) == num * config.tensor_parallel:
        os.sched_setaffinity(0, cores[rank * num : (rank + 1) * num])
