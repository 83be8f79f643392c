"""Chooses how a simulated worker gets the KV of a prompt. The functions of real workers make the
choices:

  function         choice
  peers_to_ask     a decode worker prefills the prompt itself, or a prefill worker does
  expect_pull      a worker computes the prompt's first blocks, or pulls them from another worker

Both also consider a load of blocks from the worker's own tiers (host memory, disk, object store).
"""

from collections.abc import Iterable, Mapping, Sequence

from tandem.common.perf_model.predict import (
    ASK_S,
    Expected,
    Holder,
    beside_decode,
    expect,
    prefill_seconds,
)
from tandem.common.perf_model.rates import PairRate
from tandem.common.perf_model.soonest import Offer
from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.workers.task import Task
from tandem.ops.simulator.workers.worker import SimulatedWorker
from tandem.router.placement.choose import Work, WorkerSnapshot
from tandem.router.placement.costs import reuse
from tandem.worker.decode.prefill_choice import (
    Candidate,
    LocalWorker,
    PrefillPrompt,
    plan_prefill,
    soonest_producer,
)


def peers_to_ask(
    scenario: Scenario,
    worker: SimulatedWorker,
    task: Task,
    peers: Sequence[WorkerSnapshot],
    matches: Mapping[str, int],
) -> list[str]:
    """Returns the ids of the prefill workers that a decode worker asks to prefill the prompt, best
    first. Returns [] if the decode worker prefills the prompt itself; it may then load blocks from
    its tiers."""
    if not peers or scenario.prefill_at == "local":
        return []
    if scenario.prefill_at == "remote":
        return [peer.worker_id for peer in peers]
    rates = scenario.rates
    size = scenario.block_size
    load = worker.load()
    cached = worker.cache.num_cached(task.hashes) * size
    prompt = PrefillPrompt(task.num_tokens, size)
    work = Work(task.num_tokens, size)
    local_rates = beside_decode(rates, load.chunk_tokens, 0)
    local = LocalWorker(local_rates, load.queue_s(rates), cached, num_running=load.num_running)
    candidates = []
    for peer in peers:
        reused = reuse(work, peer, matches) if rates.tiers else None
        candidates.append(
            Candidate(
                rates,
                peer.queue_s,
                reused.num_tokens if reused else matches.get(peer.worker_id, 0) * size,
                worker_id=peer.worker_id,
                pair=scenario.pair,
                load_s=reused.load_s if reused else 0.0,
            )
        )
    if worker.tiers is not None:
        producer = soonest_producer(prompt, candidates)
        if worker.plan_load(task, producer=producer) is not None:
            return []
    return list(plan_prefill(prompt, local, candidates).candidates)


def expect_pull(
    scenario: Scenario,
    worker: SimulatedWorker,
    task: Task,
    holders: Iterable[tuple[str, int, float]],
    pair: PairRate,
) -> tuple[str, Expected, float] | None:
    """Predicts the pull of the prompt's first blocks from one of `holders`.

    Holders are given as (worker id, number of prompt tokens that the worker has cached, seconds to
    load those that only its tiers have). Returns (worker id, prediction, seconds to load) for the
    soonest of them. Returns None if another way is faster.
    """
    rates = scenario.rates
    size = scenario.block_size
    cached = worker.cache.num_cached(task.hashes) * size
    soonest: tuple[str, Expected, float] | None = None
    for name, tokens, load_s in holders:
        holder = Holder(tokens, pair, load_s)
        expected = expect(rates, task.num_tokens, cached, holders=[holder], block_size=size)
        is_soonest = soonest is None or expected.total_s < soonest[1].total_s
        if name != worker.worker_id and expected.pull_s and is_soonest:
            soonest = name, expected, load_s
    if soonest is None:
        return None
    _, expected, load_s = soonest
    offer = Offer(
        expected.start // size,
        ASK_S + pair.latency_s + load_s,
        rates.block_bytes / pair.bytes_per_s,
    )
    return soonest if worker.plan_load(task, offer=offer) is None else None


def exposed_pull_s(
    scenario: Scenario, pair: PairRate, source: SimulatedWorker, task: Task, cached_tokens: int
) -> float:
    """Returns the seconds from the end of the prefill at `source` until a decode worker has pulled
    all blocks. `cached_tokens` is the number of prompt tokens that `source` had cached or loaded.

    The decode worker pulls each chunk's blocks while `source` computes the next chunk. If the
    prefill takes 3 s and the pull of all blocks 5 s, the result is about 2 s. If the pull is faster
    than the prefill, the result is the time to pull the last chunk.
    """
    rates = scenario.rates
    size = scenario.block_size
    missing = task.num_tokens - task.cached_tokens
    pull_s = pair.seconds(rates.moved_bytes(missing / size))
    compute_s = prefill_seconds(source.rates, task.num_tokens, cached_tokens)
    last = min(missing, rates.step_tokens)
    return ASK_S + max(pair.seconds(rates.moved_bytes(last / size)), pull_s - compute_s)
