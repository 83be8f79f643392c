"""Decides whether a request decodes on the worker that prefills its prompt. Does no I/O.

A prefill worker with `--prefill-at auto` also decodes. A request stays there if this saves a large
part of the seconds that its decode takes on the best decode worker, and at least `SAVED_MIN_S`. So
prefill workers decode only while decode workers have much more to do.

    seconds on the decode worker    pull of the KV + wait for a running slot + decode
    seconds on the prefill worker   decode + delay of prompts

    pull               the seconds that are left when the prompt is computed: most blocks are pulled
                       before
    decode             output tokens * (step + delay of the sequences that decode there already)
    step               seconds of a decode step. A step with a chunk of a prompt takes longer, so a
                       step counts as longer on a prefill worker that is busy with prompts.
    delay of prompts   decode beside a prompt slows the prompt: its chunks become smaller. All
                       prompts that wait behind it are delayed, too.

A request stays only on a worker that has at least as much of the prompt as the decode worker. So
the computation of the prompt takes about as long in both cases, and its seconds do not count.
Prompts of other workers' requests need running slots, too, so at most half of them
(`SLOTS_SHARE_MAX`) are for decode. Example: a request has 100 output tokens, and no prompts come. A
step takes 20 ms on a decode worker where 8 sequences decode, and each of them is delayed by 1 ms a
step. A step takes 12 ms on an idle prefill worker. Decode counts 2.8 s there and 1.2 s here, so the
request stays on the prefill worker.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import replace

import msgspec

from tandem.common.perf_model.predict import beside_decode, token_seconds
from tandem.common.perf_model.rates import DEFAULT_DECODE
from tandem.router.placement.costs import (
    PricedWorker,
    Work,
    WorkerSnapshot,
    computing_s,
    slot_wait_s,
)

# A request stays on the worker that prefills if it takes less than this fraction of the seconds on
# the decode worker. A small advantage is not enough, because loads are reported late.
STAY_MARGIN = 0.8
# Smallest number of seconds that are worth the choice.
SAVED_MIN_S = 0.25
# A worker that computes prompts for more than this fraction of the time does not decode: requests
# fill the KV pools of decode workers because they wait for their prompts, and the decode would
# delay these prompts further.
BUSY_MAX = 0.75
# A worker decodes in fewer than this fraction of its running slots. Prompts of requests that decode
# elsewhere need the others: no prompt starts while all slots are taken.
SLOTS_SHARE_MAX = 0.5
_BUSY_MAX_NOW = 0.99


def stays_on(
    work: Work,
    decode: PricedWorker,
    candidates: Sequence[PricedWorker],
    *,
    refused: Container[str],
    full_share: float,
) -> PricedWorker | None:
    """Returns the prefill candidate on which the request also decodes.

    Returns None if the request decodes on the worker `decode`, the best decode worker. The
    candidates are in order of preference. `refused` has the epochs of workers that have refused the
    request. `full_share` is the prefill share of a worker that always computed prompts; 0: unknown.
    """
    able = [c for c in candidates if c.worker.epoch not in refused and _is_able(work, c, decode)]
    if not able or not work.completion_tokens or not _has_decoded(decode.worker):
        return None
    best: PricedWorker | None = None
    moved_s = _pull_s(work, decode, candidates[0])
    # A prompt in a decode worker's queue says little about the time of the whole answer there.
    moved_s += _decode_s(work, decode.worker, busy=0.0)
    limit_s = min(STAY_MARGIN * moved_s, moved_s - SAVED_MIN_S)
    for each in able:
        worker = _with_decode_rate(each.worker, decode.worker)
        busy = worker.prefill_share / full_share if full_share else 0.0
        if busy > BUSY_MAX:
            continue
        busy = max(busy, _busy_now(work, each))
        decode_s = _decode_s(work, worker, busy)
        # A candidate that computes the prompt later than the first one must make up for that.
        stays_s = decode_s + each.cost_s - candidates[0].cost_s
        if stays_s < limit_s:
            stays_s += _delay_of_prompts_s(worker, decode.worker, decode_s, busy)
        if stays_s < limit_s:
            best, limit_s = each, stays_s
    return best


def _is_able(work: Work, candidate: PricedWorker, decode: PricedWorker) -> bool:
    """Returns whether a request may stay on the candidate: a slot is free there, and it has at
    least as much of what the request needs as the decode worker, which may have the KV of the
    earlier turns of a session."""
    worker, other = candidate.worker, decode.worker
    load, adapter = worker.load, work.adapter
    lacks_adapter = (
        adapter is not None
        and adapter.digest in other.adapters
        and adapter.digest not in worker.adapters
    )
    return (
        worker.decodes
        and other.prefill_at != "local"
        and candidate.reused.num_tokens >= decode.reused.num_tokens
        and not lacks_adapter
        and not slot_wait_s(work, worker, work.completion_tokens)
        and load.num_slots_taken < SLOTS_SHARE_MAX * (load.num_running_slots or math.inf)
    )


def _has_decoded(worker: WorkerSnapshot) -> bool:
    """Returns whether the worker has measured a decode step."""
    return worker.rates.decode != DEFAULT_DECODE


def _with_decode_rate(worker: WorkerSnapshot, other: WorkerSnapshot) -> WorkerSnapshot:
    """Returns the worker. If it has never decoded, it is assumed to decode as fast as `other`."""
    if _has_decoded(worker):
        return worker
    rates = msgspec.structs.replace(worker.rates, decode=other.rates.decode)
    return replace(worker, rates=rates)


def _busy_now(work: Work, priced: PricedWorker) -> float:
    """Estimates the fraction of the time in which a worker computes prompts, from its queue.

    With random arrivals, it is on average queue / (queue + own prompt).
    """
    queue_s = priced.worker.queue_s
    own_s = computing_s(work, priced.worker, work.num_tokens - priced.reused.num_tokens)
    return min(_BUSY_MAX_NOW, queue_s / (queue_s + own_s)) if queue_s else 0.0


def _decode_s(work: Work, worker: WorkerSnapshot, busy: float) -> float:
    """Predicts the seconds that a request waits for a running slot and decodes on a worker, plus
    the delay of the sequences that decode there already. `busy` is the fraction of the time in
    which the worker computes prompts."""
    load, rates = worker.load, worker.rates
    num_others = load.num_slots_taken
    if worker.role == "decode":  # at a prefill worker, most sequences that wait do not decode there
        num_others += load.num_waiting
    step_s = rates.decode.seconds(num_others + 1)
    chunk = min(rates.step_tokens, load.chunk_tokens or rates.step_tokens)
    mixed_s = rates.prefill.seconds(chunk, 0, chunk) + step_s - rates.decode.step_s
    if mixed_s > step_s:
        step_s /= 1 - busy * (1 - step_s / mixed_s)
    others_s = rates.decode.sequence_s * num_others
    wait_s = slot_wait_s(work, worker, work.completion_tokens)
    return wait_s + work.completion_tokens * (step_s + others_s)


def _delay_of_prompts_s(
    worker: WorkerSnapshot, decode: WorkerSnapshot, decode_s: float, busy: float
) -> float:
    """Predicts the seconds by which prompts are delayed on a prefill worker, all together, if a
    request decodes there for `decode_s` seconds."""
    load, rates = worker.load, worker.rates
    # An engine without decoding sequences cannot say how small its chunks become beside them, so
    # the decode worker's chunks count, too.
    chunks = [each.load.chunk_tokens for each in (worker, decode) if each.load.chunk_tokens]
    chunk = min([*chunks, rates.step_tokens])
    # The first sequence has most of the effect, so each of them counts an equal part of it.
    num_decoding = load.num_slots_taken + 1
    beside_s = token_seconds(beside_decode(rates, chunk, num_decoding))
    slower = (beside_s / token_seconds(rates) - 1) / num_decoding
    # In the time decode_s, the worker computes prompts for busy * decode_s. With random arrivals,
    # each of these seconds delays 1 / (1 - busy) prompts on average.
    return decode_s * slower * busy / (1 - busy)


def _pull_s(work: Work, decode: PricedWorker, producer: PricedWorker) -> float:
    """Predicts the seconds of the pull that remain when the prompt is computed."""
    pair = decode.worker.pairs.get(producer.worker.worker_id)
    if pair is None:
        return 0.0
    missing = work.num_kept(work.num_tokens - decode.reused.num_tokens) / work.block_size
    whole_s = pair.seconds(decode.worker.rates.moved_bytes(missing))
    return max(0.0, whole_s - producer.cost_s)
