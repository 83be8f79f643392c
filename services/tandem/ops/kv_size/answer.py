"""Computes the results of `tandem kv-size`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tandem.common.perf_model.rates import WorkerRates
from tandem.errors import BadRequest
from tandem.models.shape import num_parameters, read_shape
from tandem.ops.kv_size.options import WEIGHT_BYTES, KvSizeOptions
from tandem.ops.kv_size.sizes import (
    DeviceFit,
    KvSize,
    device_fit,
    kv_dtypes,
    kv_head_variants,
    kv_size,
)
from tandem.ops.kv_size.workers import SteadyLoad, Workers, workers_needed
from tandem.ops.simulator.options import read_rates

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizeAnswer:
    """The results of `tandem kv-size`. Each KvSize is about one rank."""

    model: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    context: int
    batch: int
    dtypes: list[KvSize]  # one entry for each KV dtype, for --tensor-parallel 1
    # one entry for the model, then one for each variant of the model with fewer or more KV heads
    attention: list[KvSize]
    ranks: list[KvSize]  # one entry for each value of --tensor-parallel
    # one entry for each KV dtype and each value of --tensor-parallel; empty without --memory
    device: list[DeviceFit]
    workers: Workers | None
    rates: WorkerRates | None  # speed of one worker, used to compute `workers`


def compute(options: KvSizeOptions) -> KvSizeAnswer:
    """Computes the results for these options. Raises TandemError for invalid options, and OSError
    or MsgspecError if the file of --rates cannot be read."""
    model = read_shape(options.model, revision=options.model_revision)
    context = options.context or model.max_model_len
    size = partial(
        kv_size,
        block_size=options.block_size,
        context=context,
        batch=options.batch,
        computed_dtype=options.dtype,
        state_dtype=options.state_dtype,
    )
    one_rank = partial(size, tensor_parallel=1)
    rank_counts = options.tensor_parallel
    fits = [
        device_fit(
            model,
            size(model, dtype, tensor_parallel=count),
            block_size=options.block_size,
            memory_bytes=round(options.memory * GIB),
            weight_bytes=WEIGHT_BYTES[options.weights],
            reserve_bytes=round(options.reserve * GIB),
        )
        for count in rank_counts
        for dtype in kv_dtypes(model)
        if options.memory
    ]
    workers, rates = _workers(options, fits)
    return KvSizeAnswer(
        model=options.model,
        parameters=num_parameters(model),
        layers=model.num_layers,
        heads=model.num_attention_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=options.block_size,
        context=context,
        batch=options.batch,
        dtypes=[one_rank(model, dtype) for dtype in kv_dtypes(model)],
        attention=[one_rank(shape, options.kv_dtype) for shape in kv_head_variants(model)],
        ranks=[size(model, options.kv_dtype, tensor_parallel=count) for count in rank_counts],
        device=fits,
        workers=workers,
        rates=rates,
    )


def _workers(
    options: KvSizeOptions, fits: list[DeviceFit]
) -> tuple[Workers | None, WorkerRates | None]:
    if not options.rate:
        return None, None
    rates = read_rates(options.rates)
    blocks = [
        fit.num_blocks
        for fit in fits
        if (fit.dtype, fit.tensor_parallel) == (options.kv_dtype, options.tensor_parallel[0])
    ]
    if blocks == [0]:
        raise BadRequest(
            f"--memory {options.memory:g}: the weights and --reserve leave no room for a KV "
            "block; raise --memory or --tensor-parallel, or lower --reserve"
        )
    load = SteadyLoad(
        requests_per_s=options.rate,
        prompt_tokens=options.prompt,
        completion_tokens=options.completion,
    )
    needed = workers_needed(
        load,
        rates,
        itl_s=options.itl_s,
        block_size=options.block_size,
        worker_blocks=blocks[0] if blocks else 0,
    )
    return needed, rates
