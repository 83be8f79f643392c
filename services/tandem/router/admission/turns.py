"""Orders the requests that wait for capacity: by tenant, priority and session. Does no I/O.

    1. Tenants share the work by their weights.
    2. Of one tenant, requests with a lower priority value come first. Requests that may be shed
       come after all others.
    3. Of one tenant and priority, sessions share the work equally.
    4. Of one session, the request that arrived first comes first.

The work of a request is its cost: seconds that the performance model predicts for its tokens
(`capacity.py`). So a tenant with few long requests gets as much as one with many short ones. Step 2
leaves a part of each tenant's work (`LATER_SHARE`) to those of its requests that would come later,
so that no priority starves. The router and the simulator both use this class.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.router.admission.fair_queue import FairQueue

T = TypeVar("T")

# Part of a tenant's work that goes to requests other than those of its earliest priority, as long
# as such requests wait.
LATER_SHARE = 0.1
_Class = tuple[bool, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides when a waiting request has its turn."""

    tenant: str = ""
    cost: float = 1.0  # predicted seconds of work, more than 0
    weight: float = 1.0  # weight of the tenant
    session: str = ""
    priority: int = 0  # lower is earlier
    may_shed: bool = False  # True: the request may be refused while it waits

    @property
    def of_class(self) -> _Class:
        return self.may_shed, self.priority


class Turns(Generic[T]):
    """The waiting requests. All items must differ from each other."""

    def __init__(self) -> None:
        self._claims: dict[T, Claim] = {}  # in order of arrival
        self._tenants: FairQueue[T] = FairQueue()
        # tenant -> class -> the requests of this class, with sessions as names
        self._classes: dict[str, dict[_Class, FairQueue[T]]] = defaultdict(dict)
        # tenant -> work of its earliest class that was served while later classes waited
        self._earlier: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def push(self, claim: Claim, item: T) -> None:
        self._claims[item] = claim
        self._tenants.push(claim.tenant, claim.cost, item, weight=claim.weight)
        classes = self._classes[claim.tenant]
        queue = classes.setdefault(claim.of_class, FairQueue())
        queue.push(claim.session, claim.cost, item)

    def pop(self) -> T:
        """Removes and returns the next item. Raises IndexError if there is none."""
        item = self._tenants.pop(self._pop_of)
        self._drop(item)
        return item

    def remove(self, item: T) -> bool:
        """Removes an item without serving it. Returns False if the item does not wait."""
        claim = self._claims.get(item)
        if claim is None:
            return False
        self._tenants.remove(claim.tenant, item)
        self._classes[claim.tenant][claim.of_class].remove(claim.session, item)
        self._drop(item)
        return True

    def last(self) -> T:
        """Returns the item to refuse if too many wait. Raises ValueError if there is none.

        If an item may be shed, only such items are considered. The result is the newest item of the
        longest session of the last class of the tenant that waits for the most work in proportion
        to its weight. So a tenant that floods the queue refuses only itself.
        """
        tenants = {c.tenant for c in self._claims.values() if c.may_shed} or self._classes.keys()
        classes = self._classes[self._tenants.longest(tenants)]
        queue = classes[max(classes)]
        return queue.newest(queue.longest())

    def cost_ahead(self, claim: Claim) -> float:
        """Estimates the work that is served before a new request with this claim."""
        own = self._classes.get(claim.tenant, {})
        ahead = sum(queue.cost for key, queue in own.items() if key < claim.of_class)
        if (queue := own.get(claim.of_class)) is not None:
            ahead += queue.cost_ahead(claim.session)
        return self._tenants.cost_ahead(claim.tenant, ahead)

    def settle(self, claim: Claim, cost: float) -> None:
        """Corrects what a served request counts for its tenant and its session: `cost` in place of
        the predicted cost of its claim. 0: the request got no work."""
        difference = cost - claim.cost
        self._tenants.charge(claim.tenant, difference / claim.weight)
        if (queue := self._classes.get(claim.tenant, {}).get(claim.of_class)) is not None:
            queue.charge(claim.session, difference)

    def forget(self) -> None:
        """Forgets how much work was served to each tenant. Nothing may wait."""
        self._tenants.forget()

    def _pop_of(self, tenant: str) -> T:
        """Removes the next item of a tenant from its class, and returns the item."""
        classes = self._classes[tenant]
        first = min(classes)
        if len(classes) == 1:
            return classes[first].pop()
        earlier = self._earlier.get(tenant, 0.0)
        oldest = next(
            c for c in self._claims.values() if c.tenant == tenant and c.of_class != first
        )
        times = 1 / LATER_SHARE - 1
        is_due = earlier >= times * oldest.cost
        item = classes[oldest.of_class if is_due else first].pop()
        cost = self._claims[item].cost
        self._earlier[tenant] = max(0.0, earlier - times * cost) if is_due else earlier + cost
        return item

    def _drop(self, item: T) -> None:
        claim = self._claims.pop(item)
        classes = self._classes[claim.tenant]
        if not len(classes[claim.of_class]):
            del classes[claim.of_class]
        if not classes:
            del self._classes[claim.tenant]
            self._earlier.pop(claim.tenant, None)
