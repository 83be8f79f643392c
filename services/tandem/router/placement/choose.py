"""Chooses where a request goes: a decode worker, and prefill workers in order of preference.

The cost of a request on a worker is the predicted time in seconds that the request and the requests
it delays need there (`costs.py`). A worker is chosen in three steps:
1. Workers whose cost is more than 8 ms above the lowest cost are left out.
2. Workers with many more requests than the remaining ones are left out.
   A turn of a session skips these two steps if the worker with the session's KV is not too busy.
3. Of the workers that are left, those with the most of the prompt cached are kept, and one of these
   is chosen at random. The choice is random because the loads that routers know are slightly old:
   otherwise several routers might send their requests to the same worker.
If decode workers are much busier than the prefill worker, the request decodes where its prompt is
prefilled (`decode_at.py`).
In a large pool, only a random sample and the workers with the most of the prompt cached are
compared. So a choice among a thousand workers takes little longer than a choice among thirty.

This module takes plain data and a random source, and uses no clock or socket. The simulator runs
the same code.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from random import Random

import msgspec

from tandem.common.kv_tiers import SHARED_TIERS
from tandem.prefix_index.holders import MARK
from tandem.router.placement.costs import (
    PrefixHolder,
    PricedWorker,
    Work,
    WorkerSnapshot,
    computing_s,
    loadable,
    price_decode,
    price_prefill,
    with_likely_rates,
)
from tandem.router.placement.decode_at import stays_on
from tandem.router.placement.roster import Roster

__all__ = [
    "Placement",
    "Roster",
    "Work",
    "WorkerSnapshot",
    "choose",
    "near_best",
]

# Costs that differ by at most this many seconds count as equal. The value is about one decode step,
# because reported loads are up to one decode step old.
NEAR_BEST_S = 8e-3
PREFILL_CANDIDATES_MAX = 3
PREFIX_HOLDERS_MAX = 3
FEW = 32  # in a pool of up to this many workers, all workers are compared
DRAWN = 6  # number of workers that are drawn at random from a pool with more than FEW workers
DRAWS_MAX = 8 * DRAWN
# A worker is left out if its number of requests exceeds the mean of the compared workers by more
# than this fraction. Example: with a mean of 8 requests, a worker with 11 requests is left out.
LOAD_EXCESS = 0.25
# A worker's recent prefill work (`shares.py`) may exceed the workers' mean by this fraction. The
# work is a prediction, so the real excess is larger; with 5% here it should stay below 10%.
SHARE_EXCESS = 0.05


class Placement(msgspec.Struct, frozen=True):
    """The workers chosen for a request."""

    decode: WorkerSnapshot
    prefill_candidates: tuple[WorkerSnapshot, ...]
    # Workers from which the prefilling worker may pull cached blocks of the prompt, also blocks
    # that they load from their tiers first. Each has more of the prompt than the prefilling worker.
    # The one with the most comes first. A worker is listed twice if its pool has fewer blocks than
    # its tiers.
    prefix_holders: tuple[PrefixHolder, ...]
    tokens_missing: int  # number of prompt tokens that are not cached and must be prefilled
    num_tokens: int  # length of the prompt
    # The decode worker and the request's cost there. None: the placement was not made by `choose`.
    priced: PricedWorker | None = None
    num_compared: int = 0  # number of decode workers whose costs were compared
    # The cheapest of the other decode workers, with its cost. None: there was no other one.
    runner_up: PricedWorker | None = None

    @property
    def summary(self) -> str:
        """The decision in one line for operators.

        The line is built only when it is read, so that it delays no request.
        """
        if self.priced is None:
            return ""
        reused = self.priced.reused
        load = self.decode.load
        loaded = f" load={reused.load_s * 1000:.0f}ms" if reused.load_s else ""
        prefill = ",".join([w.worker_id for w in self.prefill_candidates]) or "none"
        return (
            f"decode={self.decode.worker_id} cost={self.priced.cost_s * 1000:.0f}ms"
            f" cached={reused.num_tokens}/{self.num_tokens}{loaded}"
            f" running={load.num_running} waiting={load.num_waiting}"
            f" kv={load.kv_use:.2f} of={self.num_compared}; prefill={prefill}"
        )

    @property
    def prefill_worker(self) -> WorkerSnapshot:
        """The worker that is expected to prefill the prompt."""
        return self.prefill_candidates[0] if self.prefill_candidates else self.decode

    def prefill_s(self, work: Work) -> float:
        """Returns the predicted seconds to prefill the missing tokens, without queueing."""
        return computing_s(work, self.prefill_worker, self.tokens_missing)


def choose(
    work: Work,
    workers: Roster | Iterable[WorkerSnapshot],
    matches: Mapping[str, int],
    rng: Random,
    *,
    refused: frozenset[str] = frozenset(),
    required_decode: str = "",
    required_prefill: str = "",
) -> Placement | None:
    """Places a request. Returns None if no decode worker is usable.

    - `matches` maps ids of workers and tiers to the number of the prompt's leading blocks there.
    - `refused` has the epochs of the decode workers that have refused this request.
    - `required_decode` is the id of a worker that is chosen to decode if it is usable, whatever
      its cost.
    - `required_prefill` is the id of a prefill worker that becomes the first prefill candidate if
      it is usable, whatever its cost.
    """
    roster = workers if isinstance(workers, Roster) else Roster(workers)
    if len(roster.compatibility_keys) > 1:
        return _choose_in_one_group(
            work, roster, matches, rng, refused, required_decode, required_prefill
        )
    pools = reach = matches
    likely_to_reuse = deepest = _deepest(roster, matches, rng) if not roster.num_with_tiers else []
    in_tiers: list[WorkerSnapshot] = []
    if roster.num_with_tiers:
        pools, own, reach = _by_worker(matches)
        deepest = _deepest(roster, pools, rng)
        in_tiers = _deepest(roster, own, rng)
        likely_to_reuse = _deepest(roster, reach, rng)
    holders = _holders(work, matches, deepest, in_tiers)
    usable = _only(required_decode, roster, refused)
    usable = usable or _shortlist("decode", work, roster, likely_to_reuse, refused, rng)
    if not usable:
        return None
    required = roster.by_id.get(required_prefill)
    known = (
        likely_to_reuse if required is None or not required.usable else [required, *likely_to_reuse]
    )
    peers: list[WorkerSnapshot] = []
    # A prefill worker never waits for another one (docs/transfer.md, "No cycle of waits").
    if usable[0].role == "decode":
        peers = _shortlist("prefill", work, roster, known, frozenset(), rng)
    decode, prefill = usable, peers
    if roster.num_unmeasured:
        likely = with_likely_rates(usable + peers)
        decode = likely[: len(usable)]
        prefill = likely[len(usable) :]
    candidates: list[PricedWorker] = []
    if prefill:
        candidates = _order_prefill(
            work, prefill, matches, _few(holders), roster, rng, required_prefill
        )
    names = [c.worker.worker_id for c in candidates]
    priced = [price_decode(work, w, matches, producers=names) for w in decode]
    fit = priced if candidates else _within_share(work, priced, roster)
    stays = _keeper_of_session(work, fit) if work.is_of_session else None
    chosen = stays or _pick(_hold_most(near_best(fit), matches, roster), rng)
    if not (stays or required_decode or required_prefill):
        full_share = roster.full_share
        kept = stays_on(work, chosen, candidates, refused=refused, full_share=full_share)
        if kept is not None:
            chosen, candidates, names = kept, [], []
    others = [c for c in priced if c is not chosen]
    computes = candidates[0] if candidates else chosen
    worker_id = chosen.worker.worker_id
    computes_id = computes.worker.worker_id
    num_reused = computes.reused.num_tokens
    depth = max(pools.get(computes_id, 0), num_reused // work.block_size)
    deeper = [
        h
        for h in holders
        if h.num_blocks > depth and h.worker.worker_id not in (worker_id, computes_id)
    ]
    by_id = roster.by_id
    return Placement(
        by_id[worker_id],
        tuple([by_id[name] for name in names]),
        tuple(_few(deeper)),
        work.num_tokens - max(chosen.reused.num_tokens, num_reused),
        work.num_tokens,
        chosen,
        len(usable),
        min(others, key=lambda c: c.cost_s) if others else None,
    )


def _choose_in_one_group(
    work: Work,
    roster: Roster,
    matches: Mapping[str, int],
    rng: Random,
    refused: frozenset[str],
    required_decode: str,
    required_prefill: str,
) -> Placement | None:
    """Places a request during an upgrade, on workers of only one version.

    Workers of the old and the new version cannot exchange KV, so the workers of each version are a
    group. One group is drawn at random, weighted by the groups' numbers of usable decode workers.
    Example: with 3 old and 1 new decode workers, 75% of the requests go to the old version.
    """
    groups: dict[bytes, Roster] = {}
    for worker in roster.by_id.values():
        groups.setdefault(worker.compatibility_key, Roster()).put(worker)
    counts = [_num_usable(work, group, refused) for group in groups.values()]
    if _only(required_decode, roster, refused):
        counts = [required_decode in group.by_id for group in groups.values()]
    if not any(counts):
        return None
    (group,) = rng.choices(list(groups.values()), counts)
    group.second_weight = roster.second_weight
    group.full_share = roster.full_share
    return choose(
        work,
        group,
        matches,
        rng,
        refused=refused,
        required_decode=required_decode,
        required_prefill=required_prefill,
    )


def _only(name: str, roster: Roster, refused: frozenset[str]) -> list[WorkerSnapshot]:
    """Returns a list of the worker `name` only; an empty list if it cannot decode a request now."""
    worker = roster.by_id.get(name)
    if worker is None or not (worker.role == "decode" or worker.decodes):
        return []
    return [worker] if worker.usable and worker.epoch not in refused else []


def _num_usable(work: Work, roster: Roster, refused: frozenset[str]) -> int:
    workers = (roster.by_id[name] for name in roster.pool("decode"))
    return sum(w.usable and w.epoch not in refused and w.can_run(work) for w in workers)


def near_best(candidates: Sequence[PricedWorker]) -> list[PricedWorker]:
    """Returns the candidates whose cost is at most `NEAR_BEST_S` above the lowest cost.

    Smaller differences mean nothing, because the costs follow from loads that are slightly old.
    """
    limit = min([c.cost_s for c in candidates]) + NEAR_BEST_S
    return [c for c in candidates if c.cost_s <= limit]


def _keeper_of_session(work: Work, candidates: Sequence[PricedWorker]) -> PricedWorker | None:
    """Returns the candidate that a turn of a session stays on. None: the load decides.

    This is the candidate with the most of the prompt cached, if the turn costs there at most as
    many seconds more than on the cheapest candidate as it takes to compute the tokens that only the
    first of these two has cached. Example: a worker has 2,000 tokens of a session, which take 1 s
    to compute, and the cheapest worker has none. The turn stays if it is at most 1 s slower.

    So a session with a long history stays nearly always, although its KV could be pulled sooner:
    each move takes KV memory at one more worker. Many sessions that share only a short system
    prompt are spread over the workers.
    """
    keeper = max(candidates, key=lambda c: (c.reused.num_tokens, -c.cost_s))
    cheapest = min(candidates, key=lambda c: c.cost_s)
    if keeper.reused.num_tokens <= cheapest.reused.num_tokens:
        return None
    saved_s = _saved_s(work, keeper) - _saved_s(work, cheapest)
    return keeper if keeper.cost_s - cheapest.cost_s <= NEAR_BEST_S + saved_s else None


def _hold_most(
    candidates: list[PricedWorker], matches: Mapping[str, int], roster: Roster
) -> list[PricedWorker]:
    """Returns the candidates that have the most of the prompt cached.

    Candidates with many more requests than the candidates' mean (`LOAD_EXCESS`) are left out.
    Otherwise all routers might send requests with the same prefix to one worker before they learn
    of the worker's load.
    """
    if len(candidates) == 1 or not matches:
        return candidates
    # If workers have tiers, `reused` also counts blocks in a tier that are faster loaded than
    # computed.
    if roster.num_with_tiers:
        held = [c.reused.num_tokens for c in candidates]
    else:
        held = [matches.get(c.worker.worker_id, 0) for c in candidates]
    most = max(held)
    if min(held) == most:
        return candidates
    loads = [c.worker.load.num_requests for c in candidates]
    limit = (1 + LOAD_EXCESS) * (sum(loads) + 1) / len(candidates)
    fit = [(h, c) for h, load, c in zip(held, loads, candidates, strict=True) if load <= limit]
    most = max(fit, key=itemgetter(0))[0]
    return [c for h, c in fit if h == most]


def _pick(candidates: list[PricedWorker], rng: Random) -> PricedWorker:
    return candidates[int(rng.random() * len(candidates))]


def _within_share(work: Work, candidates: list[PricedWorker], roster: Roster) -> list[PricedWorker]:
    """Returns the candidates without too much recent prefill work (`shares.py`).

    A worker's recent prefill work may exceed the mean of the workers by the fraction `SHARE_EXCESS`
    plus the seconds of prefill that the worker's cached blocks save for this request. Example: the
    mean is 100 s, and cached blocks save 3 s. The worker is returned if its recent work is at most
    105 s + 3 s. If no worker is within its limit, the worker with the least work is returned.

    So a later turn of a conversation stays on the worker that has the conversation's blocks cached,
    because these blocks save nearly all of its prefill. Different conversations with the same
    system prompt save less, and are spread over several workers.
    """
    limit = (1 + SHARE_EXCESS) * roster.mean_prefill_share(candidates[0].worker.role)
    fit = [
        c
        for c in candidates
        if (excess := c.worker.prefill_share - limit) <= 0
        or excess <= roster.second_weight * _saved_s(work, c)
    ]
    return fit or [min(candidates, key=lambda c: c.worker.prefill_share)]


def _saved_s(work: Work, candidate: PricedWorker) -> float:
    """Returns the seconds of prefill that the worker's cached blocks save for the request."""
    reused = candidate.reused
    if not reused.num_tokens:
        return 0.0
    whole_s = computing_s(work, candidate.worker, work.num_tokens)
    rest_s = computing_s(work, candidate.worker, work.num_tokens - reused.num_tokens)
    return whole_s - rest_s - reused.load_s


def _order_prefill(
    work: Work,
    workers: list[WorkerSnapshot],
    matches: Mapping[str, int],
    holders: Sequence[PrefixHolder],
    roster: Roster,
    rng: Random,
    required: str,
) -> list[PricedWorker]:
    """Returns the prefill candidates in order of preference.

    The worker `required` is first. If `required` is not among `workers`, a cheap worker without too
    much recent prefill work is first. The other candidates follow in order of cost.
    """
    held = [(h.worker.worker_id, h.num_tokens(work), h.load_s) for h in holders]
    priced = [price_prefill(work, w, matches, held=held) for w in workers]
    first = next((c for c in priced if c.worker.worker_id == required), None)
    if first is None:
        cheap = near_best(_within_share(work, priced, roster))
        first = _pick(_hold_most(cheap, matches, roster), rng)
    others = [c for c in priced if c is not first]
    others.sort(key=lambda c: (c.cost_s, c.worker.worker_id))
    return [first, *others[: PREFILL_CANDIDATES_MAX - 1]]


def _shortlist(
    role: str,
    work: Work,
    roster: Roster,
    holders: Sequence[WorkerSnapshot],
    refused: frozenset[str],
    rng: Random,
) -> list[WorkerSnapshot]:
    """Returns the workers whose costs are compared.

    In a small pool, all workers are compared. In a large pool, `holders` and a random sample of
    workers are compared. Workers that cannot load the request's adapter are left out.
    """
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
    # The pool is small or has few usable workers, so compare all of them.
    found = [w for name in pool if (w := by_id[name]).state == "ready" and w.reachable]
    if work.adapter is not None:
        found = [w for w in found if w.can_run(work)]
    return [w for w in found if w.epoch not in refused] if refused else found


def _holders(
    work: Work,
    matches: Mapping[str, int],
    deepest: Sequence[WorkerSnapshot],
    in_tiers: Sequence[WorkerSnapshot],
) -> list[PrefixHolder]:
    """Returns from which workers blocks of the prompt can be pulled, the most blocks first.

    `deepest` are the workers with the most blocks in their pools, and `in_tiers` those with the
    most blocks in their pools and own tiers.
    """
    found = [PrefixHolder(w, matches[w.worker_id]) for w in deepest]
    for worker in in_tiers:
        found += loadable(work, worker, matches)
    if in_tiers:
        found.sort(key=lambda holder: (-holder.num_blocks, holder.load_s))
    return found


def _few(holders: Sequence[PrefixHolder]) -> list[PrefixHolder]:
    """Returns the first few holders that have the blocks in their pools, and the first few that
    load them."""
    cached = [h for h in holders if not h.load_s][:PREFIX_HOLDERS_MAX]
    loading = [h for h in holders if h.load_s][:PREFIX_HOLDERS_MAX]
    return [h for h in holders if h in cached or h in loading] if loading else cached


def _by_worker(
    matches: Mapping[str, int],
) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]]:
    """Returns three maps from a worker's id to the number of the prompt's leading blocks there.

    The first map counts the blocks in the worker's block pool only. The second map has the largest
    number in the block pool or a tier that is the worker's own, and the third one that in the block
    pool or any tier. Example: `matches` has 3 blocks in the pool of worker a, 8 in a tier of a, and
    9 in the object store; the maps have 3, 8 and 9 for a.
    """
    pools = {holder: depth for holder, depth in matches.items() if MARK not in holder}
    own: dict[str, int] = {}
    reach: dict[str, int] = {}
    for holder, depth in matches.items():
        worker_id, _, tier = holder.partition(MARK)
        reach[worker_id] = max(depth, reach.get(worker_id, 0))
        if tier not in SHARED_TIERS:
            own[worker_id] = max(depth, own.get(worker_id, 0))
    return pools, own, reach


def _deepest(roster: Roster, matches: Mapping[str, int], rng: Random) -> list[WorkerSnapshot]:
    """Returns the few usable workers that have the most leading blocks of the prompt.

    The worker with the most blocks comes first. Workers with equally many are in random order.
    """
    if not matches:
        return []
    found = _usable_of_deepest(roster, matches, rng)
    if len(found) >= PREFIX_HOLDERS_MAX or len(matches) <= FEW:
        return found
    # Too few of the found workers are usable, so search again, only among usable workers.
    by_id = roster.by_id
    usable = {n: d for n, d in matches.items() if (w := by_id.get(n)) is not None and w.usable}
    return _usable_of_deepest(roster, usable, rng) if usable else []


def _usable_of_deepest(
    roster: Roster, matches: Mapping[str, int], rng: Random
) -> list[WorkerSnapshot]:
    few = PREFIX_HOLDERS_MAX + 2
    names = list(matches)
    if len(names) > FEW:
        # Often many workers have equally many blocks, such as all blocks of a system prompt. Use
        # only those with the largest number, which saves sorting the others.
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
    found = [by_id.get(name) for name in names if matches[name] > 0]
    return [w for w in found if w is not None and w.state == "ready" and w.reachable][:few]
