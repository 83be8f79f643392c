"""Between the messages of proto/tandem/v1/worker.proto and the plain data of the parts."""

from __future__ import annotations

import msgspec

from tandem.cost_model import PairRate
from tandem.engine.types import Mode, SamplingParams, SequenceSpec
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.store.registry import Contract, Load
from tandem.transfer.reach import HostIdentity


def sequence_spec(
    message: pb.SequenceInput,
    *,
    sequence_id: str,
    mode: Mode,
    remote_prefill_min_tokens: int = 0,
    first_wanted_block: int = 0,
    reader_rate: tuple[float, float] | None = None,
) -> SequenceSpec:
    sampling = message.sampling
    return SequenceSpec(
        sequence_id=sequence_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        mode=mode,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        max_tokens=message.max_tokens,
        stop_token_ids=list(message.stop_token_ids),
        cache_salt=message.cache_salt,
        remote_prefill_min_tokens=remote_prefill_min_tokens,
        first_wanted_block=first_wanted_block,
        reader_rate=reader_rate,
    )


def sequence_input(spec: SequenceSpec) -> pb.SequenceInput:
    return pb.SequenceInput(
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=pb.Sampling(
            temperature=spec.sampling.temperature,
            top_k=spec.sampling.top_k,
            top_p=spec.sampling.top_p,
            min_p=spec.sampling.min_p,
            seed=spec.sampling.seed,
        ),
        max_tokens=spec.max_tokens,
        stop_token_ids=spec.stop_token_ids,
        cache_salt=spec.cache_salt,
    )


def contract_message(contract: Contract) -> pb.Contract:
    return pb.Contract(**{name: getattr(contract, name) for name in contract.__struct_fields__})


def contract_from(message: pb.Contract) -> Contract:
    return Contract(**{name: getattr(message, name) for name in Contract.__struct_fields__})


def load_message(load: Load) -> pb.WorkerLoad:
    return pb.WorkerLoad(**{name: getattr(load, name) for name in load.__struct_fields__})


def host_message(host: HostIdentity) -> pb.HostIdentity:
    return pb.HostIdentity(**msgspec.structs.asdict(host))


def host_from(message: pb.HostIdentity) -> HostIdentity:
    return HostIdentity(
        boot_id=message.boot_id,
        pid_namespace=message.pid_namespace,
        uid=message.uid,
        cma=message.cma,
        rdma=message.rdma,
        ipc_namespace=message.ipc_namespace,
        tcp=message.tcp,
    )


def trace_headers(message: pb.TraceContext) -> dict[str, str]:
    return {"traceparent": message.traceparent, "tracestate": message.tracestate}


def rate_message(rate: PairRate) -> pb.PairRate:
    return pb.PairRate(latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s)
