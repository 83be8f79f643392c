"""Chooses where a request goes: a decode worker, and prefill workers in order of preference.

Pure: plain data in, plain data out; no clock, no socket, and the random source is an argument. The
simulator runs this same code. The cost of a worker is the time that the request is predicted to
lose there (`costs.py`).

Routers see load that is stale by a step or a record, so the choice is random among the near-best:
among those that hold the most of the prompt and have not much more requests than the others.
Of a large pool only some, drawn at random, and those who hold the most of the prompt are weighed:
a choice among a thousand takes little longer than one among thirty.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from random import Random

from tandem.prefix_index.holders import MARK, worker_of
from tandem.router.placement.costs import (
    Work,
    WorkerSnapshot,
    cached_tokens,
    computing_s,
    decode_cost,
    prefill_cost,
    reuse,
    with_likely_rates,
)
from tandem.router.placement.roster import Roster

__all__ = [
    "Placement",
    "Roster",
    "Work",
    "WorkerSnapshot",
    "choose",
    "decode_cost",
    "near_best",
    "prefill_cost",
]

NEAR_BEST_S = 8e-3  # a decode step: what load that is one step old cannot tell
PREFILL_CANDIDATES_MAX = 3
PREFIX_HOLDERS_MAX = 3
FEW = 32  # workers that are all weighed; of more, some are drawn
DRAWN = 6  # of each pool
DRAWS_MAX = 8 * DRAWN
LOAD_EXCESS = 0.25  # of the near-best workers' mean requests: a prefix draws so many more, and one
SHARE_EXCESS = 0.05  # of the mean: half of 10%, for what was predicted of a share is not exact


@dataclass(frozen=True, slots=True)
class Placement:
    decode: WorkerSnapshot
    prefill_candidates: tuple[WorkerSnapshot, ...]
    # Others that have more of the prompt than the first candidate, the deepest first.
    prefix_holders: tuple[WorkerSnapshot, ...]
    tokens_missing: int  # where the prompt will be prefilled: the first candidate, else decode
    reason: str

    @property
    def computes(self) -> WorkerSnapshot:
        """The worker that is expected to prefill the prompt."""
        return self.prefill_candidates[0] if self.prefill_candidates else self.decode

    def prefill_s(self, work: Work) -> float:
        """Seconds that computing the missing tokens takes there, with nobody ahead."""
        return computing_s(work, self.computes, self.tokens_missing)


def choose(
    work: Work,
    workers: Roster | Iterable[WorkerSnapshot],
    matches: Mapping[str, int],
    rng: Random,
    *,
    refused: frozenset[str] = frozenset(),
    near: str = "",
    first: str = "",
) -> Placement | None:
    """Places a request; None if no decode worker is usable. `matches` is its blocks by holder: a
    worker, or a tier of it.

    Workers whose epoch is in `refused` said no to this request already. The decode worker `near` is
    chosen whatever it costs, if it is usable; so is `first` the first prefill candidate.
    """
    roster = workers if isinstance(workers, Roster) else Roster(workers)
    if len(roster.compatibility_keys) > 1:
        return _choose_one_generation(work, roster, matches, rng, refused, near, first)
    pools, reach = _by_worker(matches) if roster.num_with_tiers else (matches, matches)
    holders = _deepest(roster, pools, rng)
    likely_to_reuse = _deepest(roster, reach, rng) if reach is not pools else holders
    usable = _only(near, roster, refused)
    usable = usable or _shortlist("decode", work, roster, likely_to_reuse, refused, rng)
    if not usable:
        return None
    wanted = roster.by_id.get(first)
    known = likely_to_reuse if wanted is None or not wanted.usable else [wanted, *likely_to_reuse]
    peers = _shortlist("prefill", work, roster, known, frozenset(), rng)
    likely = with_likely_rates(usable + peers)
    decode = likely[: len(usable)]
    prefill = likely[len(usable) :]
    candidates: list[WorkerSnapshot] = []
    if prefill:
        producers = holders[:PREFIX_HOLDERS_MAX]
        candidates = _order_prefill(work, prefill, matches, producers, roster, rng, first)
    else:
        decode = _within_share(work, decode, matches, roster)
    costs = {w.worker_id: decode_cost(work, w, matches, producers=candidates) for w in decode}
    chosen = _pick(_hold_most(work, near_best(decode, costs), matches, roster), rng)
    prefills = candidates[0] if candidates else chosen
    cached = reuse(work, chosen, matches)
    there = reuse(work, prefills, matches)
    tokens_missing = work.num_tokens - max(cached.num_tokens, there.num_tokens)
    depth = max(pools.get(prefills.worker_id, 0), there.num_tokens // work.block_size)
    taken = (chosen.worker_id, prefills.worker_id)
    deeper = [w for w in holders if pools[w.worker_id] > depth and w.worker_id not in taken]
    loaded = f" load={cached.load_s * 1000:.0f}ms" if cached.load_s else ""
    names = ",".join([w.worker_id for w in candidates]) or "none"
    reason = (
        f"decode={chosen.worker_id} cost={costs[chosen.worker_id] * 1000:.0f}ms"
        f" cached={cached.num_tokens}/{work.num_tokens}{loaded}"
        f" running={chosen.num_running} waiting={chosen.num_waiting}"
        f" kv={chosen.kv_use:.2f} of={len(usable)}; prefill={names}"
    )
    by_id = roster.by_id
    return Placement(
        by_id[chosen.worker_id],
        tuple([by_id[w.worker_id] for w in candidates]),
        tuple(deeper[:PREFIX_HOLDERS_MAX]),
        tokens_missing,
        reason,
    )


def _choose_one_generation(
    work: Work,
    roster: Roster,
    matches: Mapping[str, int],
    rng: Random,
    refused: frozenset[str],
    near: str,
    first: str,
) -> Placement | None:
    """Places by one KV compatibility in an upgrade, drawn by how many of its workers decode."""
    groups: dict[bytes, Roster] = {}
    for worker in roster.by_id.values():
        groups.setdefault(worker.compatibility_key, Roster()).put(worker)
    counts = [_num_usable(work, group, refused) for group in groups.values()]
    if _only(near, roster, refused):
        counts = [near in group.by_id for group in groups.values()]
    if not any(counts):
        return None
    (group,) = rng.choices(list(groups.values()), counts)
    group.second = roster.second
    return choose(work, group, matches, rng, refused=refused, near=near, first=first)


def _only(name: str, roster: Roster, refused: frozenset[str]) -> list[WorkerSnapshot]:
    """Returns this decode worker, or nobody if it is not usable."""
    worker = roster.by_id.get(name)
    if worker is None or worker.role != "decode" or worker.epoch in refused:
        return []
    return [worker] if worker.usable else []


def _num_usable(work: Work, roster: Roster, refused: frozenset[str]) -> int:
    workers = (roster.by_id[name] for name in roster.pool("decode"))
    return sum(w.usable and w.epoch not in refused and w.can_run(work) for w in workers)


def near_best(
    workers: Sequence[WorkerSnapshot], costs: Mapping[str, float]
) -> list[WorkerSnapshot]:
    """Returns the workers whose cost is too close to the lowest for stale load to tell apart."""
    limit = min([costs[w.worker_id] for w in workers]) + NEAR_BEST_S
    return [w for w in workers if costs[w.worker_id] <= limit]


def _hold_most(
    work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], roster: Roster
) -> list[WorkerSnapshot]:
    """Returns those of some near-best workers that hold the most of the prompt. One that has many
    more requests than the mean is left out: several routers may see the same prefix there, and each
    of them only its own requests."""
    if len(workers) == 1 or not matches:
        return workers
    if roster.num_with_tiers:  # a tier that is slower than computing is no help
        held = [reuse(work, w, matches).num_tokens for w in workers]
    else:
        held = [matches.get(w.worker_id, 0) for w in workers]
    most = max(held)
    if min(held) == most:
        return workers
    loads = [w.num_requests for w in workers]
    limit = (1 + LOAD_EXCESS) * (sum(loads) + 1) / len(workers)
    fit = [(h, w) for h, load, w in zip(held, loads, workers, strict=True) if load <= limit]
    most = max(fit, key=itemgetter(0))[0]
    return [w for h, w in fit if h == most]


def _pick(workers: list[WorkerSnapshot], rng: Random) -> WorkerSnapshot:
    return workers[int(rng.random() * len(workers))]


def _within_share(
    work: Work, workers: list[WorkerSnapshot], matches: Mapping[str, int], roster: Roster
) -> list[WorkerSnapshot]:
    """Returns the workers that may take more prefill; if none may, the one furthest below the mean.

    A worker's share of late, this request in it, stays under the mean and `SHARE_EXCESS` of it
    and one request: the whole prompt, computed. So one conversation stays where its blocks are,
    for its turns together cost that once; a prefix that many share spreads.
    """
    limit = (1 + SHARE_EXCESS) * roster.mean_placed(workers[0].role)
    fit = [
        w
        for w in workers
        if w.placed <= limit or w.placed - limit <= roster.second * _saved_s(work, w, matches)
    ]
    return fit or [min(workers, key=lambda w: w.placed)]


def _saved_s(work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]) -> float:
    """Seconds of prefill that the worker's cached blocks save."""
    reused = reuse(work, worker, matches)
    if not reused.num_tokens:
        return 0.0
    whole_s = computing_s(work, worker, work.num_tokens)
    rest_s = computing_s(work, worker, work.num_tokens - reused.num_tokens)
    return whole_s - rest_s - reused.load_s


def _order_prefill(
    work: Work,
    workers: list[WorkerSnapshot],
    matches: Mapping[str, int],
    holders: Sequence[WorkerSnapshot],
    roster: Roster,
    rng: Random,
    wanted: str,
) -> list[WorkerSnapshot]:
    """Puts the wanted worker first, or a random near-best one that may take more; then all others
    by cost."""
    held = {h.worker_id: cached_tokens(work, h, matches) for h in holders}
    costs = {w.worker_id: prefill_cost(work, w, matches, held=held) for w in workers}
    first = next((w for w in workers if w.worker_id == wanted), None)
    if first is None:
        near = near_best(_within_share(work, workers, matches, roster), costs)
        first = _pick(_hold_most(work, near, matches, roster), rng)
    rest = [w for w in workers if w is not first]
    rest.sort(key=lambda w: (costs[w.worker_id], w.worker_id))
    return [first, *rest[: PREFILL_CANDIDATES_MAX - 1]]


def _shortlist(
    role: str,
    work: Work,
    roster: Roster,
    holders: Sequence[WorkerSnapshot],
    refused: frozenset[str],
    rng: Random,
) -> list[WorkerSnapshot]:
    """Returns the workers to weigh: all of a small pool, else some at random and the holders. A
    worker that cannot have the request's adapter is none of them."""
    pool = roster.pool(role)
    by_id = roster.by_id
    count = len(pool)
    if count > FEW:
        drawn = {
            w.worker_id: w
            for w in holders
            if w.role == role and w.epoch not in refused and w.can_run(work)
        }
        wanted = len(drawn) + DRAWN
        for _ in range(DRAWS_MAX):
            w = by_id[pool[int(rng.random() * count)]]
            is_ready = w.state == "ready" and w.reachable and w.epoch not in refused
            if is_ready and w.can_run(work):
                drawn[w.worker_id] = w
                if len(drawn) == wanted:
                    return list(drawn.values())
    # The pool is small, or few of it are usable: nobody may be missed.
    found = [w for name in pool if (w := by_id[name]).state == "ready" and w.reachable]
    if work.adapter is not None:
        found = [w for w in found if w.can_run(work)]
    return [w for w in found if w.epoch not in refused] if refused else found


def _by_worker(matches: Mapping[str, int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Returns the blocks of workers' pools, and of each worker's deepest holder."""
    pools = {holder: depth for holder, depth in matches.items() if MARK not in holder}
    reach: dict[str, int] = {}
    for holder, depth in matches.items():
        worker_id = worker_of(holder)
        reach[worker_id] = max(depth, reach.get(worker_id, 0))
    return pools, reach


def _deepest(roster: Roster, matches: Mapping[str, int], rng: Random) -> list[WorkerSnapshot]:
    """Returns a few workers with the most of the prompt, the most first, at random among equals."""
    if not matches:
        return []
    found = _usable_of_deepest(roster, matches, rng)
    if len(found) >= PREFIX_HOLDERS_MAX or len(matches) <= FEW:
        return found
    # Those who have the most leave, perhaps, and others have nearly as much.
    by_id = roster.by_id
    usable = {n: d for n, d in matches.items() if (w := by_id.get(n)) is not None and w.usable}
    return _usable_of_deepest(roster, usable, rng) if usable else []


def _usable_of_deepest(
    roster: Roster, matches: Mapping[str, int], rng: Random
) -> list[WorkerSnapshot]:
    few = PREFIX_HOLDERS_MAX + 2
    names = list(matches)
    if len(names) > FEW:
        # Often a thousand have the first block, and a few of them more.
        deepest = max(matches.values())
        among = [name for name, depth in matches.items() if depth == deepest]
        names = among if len(among) >= few else names
    start = int(rng.random() * len(names))
    names = names[start:] + names[:start]
    if len(names) > FEW:
        names = nlargest(few, names, key=matches.__getitem__)
    else:
        names.sort(key=matches.__getitem__, reverse=True)
    by_id = roster.by_id
    found = [w for name in names if matches[name] > 0 and (w := by_id.get(name)) is not None]
    return [w for w in found if w.usable][:few]
