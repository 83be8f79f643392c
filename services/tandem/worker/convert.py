"""Converts between the messages of proto/tandem/v1/worker.proto and plain data types."""

import time
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.rates import PairRate
from tandem.common.retention import NO_RETENTION, PRIORITY_DEFAULT, Retention
from tandem.engine.types import Mode, SamplingParams, SequenceSpec, TokenLogprobs
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

_Plain = TypeVar("_Plain", bound=msgspec.Struct)


def plain_of(kind: type[_Plain], source: object, **fields: Any) -> _Plain:
    """Builds a `kind` from `fields`; every other field is copied from `source` by name."""
    same = (name for name in kind.__struct_fields__ if name not in fields)
    return kind(**{name: getattr(source, name) for name in same}, **fields)


def sequence_spec(
    message: pb.SequenceInput,
    *,
    sequence_id: str,
    mode: Mode,
    remote_prefill_min_tokens: int = 0,
    first_wanted_block: int = 0,
    consumer_rate: tuple[float, float] | None = None,
    fork_of: str = "",
    first_token_s: float = 0.0,
    late_s: float = 0.0,
) -> SequenceSpec:
    """Returns the engine's spec of a sequence that has just arrived.

    `late_s` is the time in seconds that its message spent in transit; it shortens the deadline
    `first_token_s`.
    """
    return SequenceSpec(
        sequence_id=sequence_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        mode=mode,
        sampling=_sampling_params(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=list(message.stop_token_ids),
        cache_salt=message.cache_salt,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
        embed=message.embed,
        adapter=adapter_of(message),
        kv_budget=plain_of(KvBudget, message.kv_budget) if message.HasField("kv_budget") else None,
        remote_prefill_min_tokens=remote_prefill_min_tokens,
        first_wanted_block=first_wanted_block,
        consumer_rate=consumer_rate,
        fork_of=fork_of,
        retention=retention_of(message),
        first_token_by=time.monotonic() + first_token_s - late_s if first_token_s else 0.0,
    )


def sequence_input(spec: SequenceSpec) -> pb.SequenceInput:
    return pb.SequenceInput(
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=_sampling_message(spec.sampling),
        max_tokens=spec.max_tokens,
        stop_token_ids=spec.stop_token_ids,
        cache_salt=spec.cache_salt,
        prompt_logprobs=spec.prompt_logprobs,
        grammar=spec.grammar,
        embed=spec.embed,
        adapter=adapter_message(spec.adapter),
        retention=pb.Retention(**asdict(spec.retention)),
        kv_budget=budget_message(spec.kv_budget),
    )


def adapter_of(message: pb.SequenceInput | pb.AddAdapterRequest) -> Adapter | None:
    return plain_of(Adapter, message.adapter) if message.HasField("adapter") else None


def retention_of(message: pb.SequenceInput | pb.KeepRequest) -> Retention:
    """Returns the retention of a request's KV. Requests of older routers have none or no
    priority.
    """
    if not message.HasField("retention"):
        return NO_RETENTION
    sent = message.retention
    priority = sent.priority if sent.HasField("priority") else PRIORITY_DEFAULT
    return plain_of(Retention, sent, weight=max(1, sent.weight), priority=priority)


def adapter_message(adapter: Adapter | None) -> pb.Adapter | None:
    return None if adapter is None else pb.Adapter(**asdict(adapter))


def budget_message(budget: KvBudget | None) -> pb.SequenceKvBudget | None:
    return None if budget is None else pb.SequenceKvBudget(**asdict(budget))


def cached_of(message: pb.Prefilled) -> CachedTokens:
    """Returns the cached tokens of a prompt on its prefill worker, by tier.

    Without tiers, or from an older worker, all of them count as cached in its pool.
    """
    if message.HasField("cached_by_tier"):
        return plain_of(CachedTokens, message.cached_by_tier)
    return CachedTokens(device=message.cached_tokens)


def cached_message(cached: CachedTokens) -> pb.CachedTokens:
    return pb.CachedTokens(**asdict(cached))


def _sampling_params(message: pb.Sampling) -> SamplingParams:
    return plain_of(
        SamplingParams,
        message,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        bad_words=[list(word.ids) for word in message.bad_words],
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _sampling_message(sampling: SamplingParams) -> pb.Sampling:
    bad_words = [pb.TokenRun(ids=word) for word in sampling.bad_words]
    return pb.Sampling(**{**asdict(sampling), "bad_words": bad_words})


def logprobs_message(logprobs: TokenLogprobs) -> pb.LogprobEntry:
    return pb.LogprobEntry(**asdict(logprobs))


def trace_headers(message: pb.TraceContext) -> dict[str, str]:
    return {"traceparent": message.traceparent, "tracestate": message.tracestate}


def rate_message(rate: PairRate) -> pb.PairRate:
    return pb.PairRate(latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s)
