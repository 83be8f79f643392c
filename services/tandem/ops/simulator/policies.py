"""Placement policies to compare. Each policy is a function with the signature of `choose`, the
router's own policy.

policy         worker that the policy chooses
tandem         the choice of the router (services/tandem/router/placement/choose.py)
random         a random worker
round-robin    each worker in turn
least-loaded   the worker with the fewest running and waiting requests
prefix-only    the worker with the longest cached prefix; random among equals
dynamo         the worker with the lowest cost, by the published rule of Dynamo's KV router
dynamo-softmax a random worker; workers with lower costs are more likely (softmax with the
               temperature 0.5)

Dynamo's cost of a worker is a number of blocks. For example, the prompts in the worker's queue have
100 blocks to prefill, and 500 blocks of its KV pool are in use. The new prompt has 20 blocks, of
which the worker has 5 cached. The cost is 100 + (20 - 5) + 500 + 20 = 635. Dynamo can also give the
blocks to prefill another weight than 1.

https://docs.nvidia.com/dynamo/latest/components/router/README.html
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from tandem.router.placement.choose import Placement, Roster, Work, WorkerSnapshot, choose
from tandem.router.placement.costs import cached_tokens

Policy = Callable[..., Placement | None]  # a function with the signature of `choose`
Pick = Callable[[Work, list[WorkerSnapshot], Mapping[str, int], Random], WorkerSnapshot]
# The arguments are the prompt, the worker, and the number of the prompt's blocks that the worker
# has cached. The result is the cost of placing the prompt on the worker.
Cost = Callable[[Work, WorkerSnapshot, int], float]


def make_policy(name: str) -> Policy:
    """Returns the policy with this name. Raises KeyError for an unknown name."""
    return choose if name == "tandem" else partial(_place, _PICKS[name]())


def _place(
    pick: Pick,
    work: Work,
    workers: Roster,
    matches: Mapping[str, int],
    rng: Random,
    *,
    refused: frozenset[str] = frozenset(),
) -> Placement | None:
    """Places a request: `pick` chooses the worker of each pool."""
    usable = [w for w in workers.by_id.values() if w.usable and w.epoch not in refused]
    decode = [w for w in usable if w.role == "decode"]
    prefill = [w for w in usable if w.role == "prefill"]
    if not decode:
        return None
    chosen = pick(work, decode, matches, rng)
    candidates = (pick(work, prefill, matches, rng),) if prefill else ()
    computes = (*candidates, chosen)[0]
    cached = cached_tokens(work, chosen, matches)
    available = max(cached, cached_tokens(work, computes, matches))
    return Placement(chosen, candidates, (), work.num_tokens - available, work.num_tokens)


def _in_turn() -> Pick:
    turns = Counter[str]()

    def pick(
        work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
    ) -> WorkerSnapshot:
        role = workers[0].role
        turns[role] += 1
        return workers[turns[role] % len(workers)]

    return pick


def _lowest(cost: Cost, temperature: float = 0.0) -> Pick:
    """Returns a function that picks a worker by cost.

    If `temperature` is 0, it picks the worker with the lowest cost, at random among equals.
    Otherwise the pick is random: the costs are scaled to the range 0 to 1, and a worker with the
    scaled cost c is picked with a probability proportional to exp(-c / temperature).
    """

    def pick(
        work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], rng: Random
    ) -> WorkerSnapshot:
        costs = [cost(work, w, matches.get(w.worker_id, 0)) for w in workers]
        low = min(costs)
        high = max(costs)
        if temperature == 0 or low == high:
            return rng.choice([w for w, c in zip(workers, costs, strict=True) if c == low])
        weights = [math.exp(-(c - low) / (high - low) / temperature) for c in costs]
        return rng.choices(workers, weights)[0]

    return pick


def _dynamo(work: Work, worker: WorkerSnapshot, num_cached_blocks: int) -> float:
    missing = work.num_tokens - num_cached_blocks * work.block_size
    prefill_blocks = (worker.load.queued_tokens + missing) / work.block_size
    decode_blocks = worker.load.blocks_used + work.num_tokens / work.block_size
    return prefill_blocks + decode_blocks


_PICKS: dict[str, Callable[[], Pick]] = {
    "random": lambda: _lowest(lambda work, worker, cached: 0.0),
    "round-robin": _in_turn,
    "least-loaded": lambda: _lowest(lambda work, worker, cached: worker.load.num_requests),
    "prefix-only": lambda: _lowest(lambda work, worker, cached: -cached),
    "dynamo": lambda: _lowest(_dynamo),
    "dynamo-softmax": lambda: _lowest(_dynamo, temperature=0.5),
}
POLICIES = ("tandem", *_PICKS)
