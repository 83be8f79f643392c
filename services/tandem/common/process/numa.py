"""The NUMA nodes of this machine: groups of cores, each with memory of its own.

A core reads the memory of another node more slowly. Linux takes a new page from the node of the
core that first writes to it. So an engine whose cores are all in one node, and which is pinned to
them before it allocates anything, has its KV pool and converted weights in that node.
"""

from collections.abc import Collection
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def by_node(cores: Collection[int], nodes: Path = _NODES) -> list[list[int]]:
    """Groups cores by NUMA node, and sorts each group. Cores whose node is unknown are the last
    group. `nodes` is the folder in which Linux describes the nodes."""
    left = set(cores)
    groups = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[len("node") :])):
        group = sorted(left & set(_read_ranges(folder / "cpulist")))
        left -= set(group)
        groups.append(group)
    return [group for group in (*groups, sorted(left)) if group]


def _read_ranges(path: Path) -> list[int]:
    """Reads cores in Linux's format: 0-1,4 gives 0, 1 and 4."""
    cores: list[int] = []
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return cores
