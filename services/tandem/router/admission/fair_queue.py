"""Who is next among requests that wait, so that each tenant gets its share of the work. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each tenant's first request has a
start: where the one before it ended, in work of that tenant, or where the queue is now if none
waited. The lowest start goes next, and it is where the queue is now; among equals who came first.

While two tenants wait, what was served of them differs by at most one request of each; one that
comes new waits for at most one request of each other; a tenant alone is served in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Line(Generic[T]):
    start: float  # of its first request
    cost: float = 0.0  # of all that wait
    waiting: dict[T, tuple[int, float]] = field(default_factory=dict)  # number and cost, in order


class FairQueue(Generic[T]):
    """Items are told apart by equality. Costs are positive, in any unit."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._ends: dict[str, float] = {}  # of tenants that were served and have nobody waiting
        self._now = 0.0
        self._number = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, cost: float, item: T) -> None:
        assert cost > 0, cost
        line = self._lines.get(tenant)
        if line is None:
            start = max(self._now, self._ends.pop(tenant, 0.0))
            line = self._lines[tenant] = _Line(start)
        self._number += 1
        line.waiting[item] = (self._number, cost)
        line.cost += cost
        self._size += 1

    def pop(self) -> T:
        """Takes the next one out. Raises IndexError when nobody waits."""
        if not self._lines:
            raise IndexError("nobody waits")
        tenant = min(self._lines, key=self._turn)
        line = self._lines[tenant]
        item = next(iter(line.waiting))
        self._now = line.start
        line.start += self._take(tenant, line, item)
        if not self._lines:
            # Everybody was served: nobody is owed anything.
            self._ends.clear()
        else:
            if tenant not in self._lines:
                self._ends[tenant] = line.start
            self._ends = {t: end for t, end in self._ends.items() if end > self._now}
        return item

    def remove(self, tenant: str, item: T) -> bool:
        """Of one that waits no more, at no cost to its tenant. False when it does not wait."""
        line = self._lines.get(tenant)
        if line is None or item not in line.waiting:
            return False
        self._take(tenant, line, item)
        if tenant not in self._lines and line.start > self._now:
            self._ends[tenant] = line.start
        return True

    def cost_ahead(self, tenant: str) -> float:
        """What is served before a request of this tenant that comes now, but for the last of each
        other tenant."""
        own = self._lines.get(tenant)
        start = own.start + own.cost if own else max(self._now, self._ends.get(tenant, 0.0))
        others = (
            min(line.cost, max(0.0, start - line.start))
            for name, line in self._lines.items()
            if name != tenant
        )
        return (own.cost if own else 0.0) + sum(others)

    def _turn(self, tenant: str) -> tuple[float, int]:
        line = self._lines[tenant]
        number, _ = next(iter(line.waiting.values()))
        return line.start, number

    def _take(self, tenant: str, line: _Line[T], item: T) -> float:
        _, cost = line.waiting.pop(item)
        line.cost -= cost
        self._size -= 1
        if not line.waiting:
            del self._lines[tenant]
        return cost
