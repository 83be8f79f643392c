"""Computes how many workers a steady load needs, by the policy of the autoscaler. Does no I/O.

The autoscaler gets a single observation: a long interval in which the load was constant, no request
waited in a queue, and every request met its latency limits. So its decision depends only on the
load and on the KV use of the decode workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.predict import prefill_seconds
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.autoscaler.demand import Demand, Observation, PoolSeen
from tandem.router.autoscaler.policy import Autoscaler, decode_tokens_per_s

_WORKERS_MAX = 1_000_000
_REQUESTS = 1_000  # requests in the interval that the autoscaler observes


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyLoad:
    """A constant load: all requests have the same length, and no prompt is cached."""

    requests_per_s: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The needed pool sizes, the reasons that the autoscaler gives, and intermediate results."""

    prefill: int
    decode: int
    prefill_why: str
    decode_why: str
    prompt_s: float  # seconds that a prefill worker needs for one prompt
    decode_tokens_per_s: float  # tokens per second of one decode worker within the ITL limit
    # mean number of sequences that decode at the same time, summed over all decode workers
    sequences: float
    sequence_blocks: int  # blocks of one sequence: the prompt and its completion
    worker_blocks: int  # blocks in the KV pool of one worker; 0: unknown, so KV use is ignored


def workers_needed(
    load: SteadyLoad, rates: WorkerRates, *, itl_s: float, block_size: int, worker_blocks: int
) -> Workers:
    """Returns the pool sizes that the autoscaler chooses for a constant load. `itl_s` is the limit
    on the time between two tokens.

    `worker_blocks` is the number of blocks in each worker's KV pool. 0 ignores KV memory.
    """
    config = AutoscaleConfig(
        mode="on", itl_s=itl_s, prefill_max=_WORKERS_MAX, decode_max=_WORKERS_MAX
    )
    prompt_s = prefill_seconds(rates, load.prompt_tokens, 0)
    tokens_per_s = decode_tokens_per_s(rates.decode, itl_s)
    # `in_batch` is the number of sequences in the largest decode batch that meets the ITL limit.
    # Every sequence is assumed to run in such a batch. By Little's law, the number of decoding
    # sequences is requests per second * seconds that a request decodes.
    in_batch = max(1.0, (itl_s - rates.decode.step_s) / max(rates.decode.sequence_s, 1e-9))
    sequences = load.requests_per_s * load.completion_tokens * in_batch / tokens_per_s
    sequence_blocks = -(-(load.prompt_tokens + load.completion_tokens) // block_size)
    kv_use = sequences * sequence_blocks / worker_blocks if worker_blocks else 0.0

    scaler = Autoscaler(config, 0.0)
    pool = PoolSeen(wanted=1, num_ready=1)
    scaler.decide(Observation(0.0, Demand(), pool, pool, rates.decode))
    came = Demand(
        num_requests=_REQUESTS,
        prefill_s=_REQUESTS * prompt_s,
        num_ended=_REQUESTS,
        output_tokens=_REQUESTS * load.completion_tokens,
    )
    decode_pool = PoolSeen(wanted=1, num_ready=1, kv_use=kv_use)
    seen = Observation(_REQUESTS / load.requests_per_s, came, pool, decode_pool, rates.decode)
    prefill, decode = scaler.decide(seen)
    return Workers(
        prefill=prefill.wanted,
        decode=decode.wanted,
        prefill_why=prefill.why,
        decode_why=decode.why,
        prompt_s=prompt_s,
        decode_tokens_per_s=tokens_per_s,
        sequences=sequences,
        sequence_blocks=sequence_blocks,
        worker_blocks=worker_blocks,
    )
