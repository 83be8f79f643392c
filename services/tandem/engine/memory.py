"""Compares the memory that a worker needs with the memory that is free on its machine.

    kernels    memory that a worker needs
    native     KV pool + packed weights + the largest tensor while it is converted
    others     KV pool + weights in the compute dtype

A worker that takes images also needs its vision tower, which it loads with the first image. An
encode worker needs nothing else.

Native kernels convert and pack one tensor at a time. A tensor that needs no conversion is mapped
from the file and does not count, because the operating system can reclaim mapped pages when memory
is short. Before the launcher starts workers, it checks the memory for all of them together. Each
engine checks again, before it allocates memory.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from tandem.common.config.engine import EngineOptions
from tandem.common.dtypes import DTYPE_BYTES, compute_dtype, cpu_has_bfloat16
from tandem.engine.cache.layout.kv_groups import (
    STEP_TOKENS,
    KvLayout,
    divide_pool,
    model_layout,
)
from tandem.models.draft import draft_options
from tandem.models.folder import ModelFolder
from tandem.models.images import tower_bytes
from tandem.models.shape import num_parameters


@dataclass(frozen=True, slots=True)
class Memory:
    """The free and total memory of this machine or container."""

    place: str  # "this machine" or "this container", for messages
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one worker needs. `weights_bytes` is 0 while the model is unknown."""

    option: str  # option that sets the size of the KV pool, and its value, for messages
    pool_bytes: int
    weights_bytes: int
    tower_bytes: int = 0  # of the vision tower; 0: the worker takes no images
    draft_bytes: int = 0  # of the draft model with its pool, beside the rest; 0: there is none

    @property
    def num_bytes(self) -> int:
        """The bytes of a worker without a draft model."""
        return self.pool_bytes + self.weights_bytes + self.tower_bytes

    def bytes_of(self, num_workers: int, *, num_drafts: int, num_encode: int = 0) -> int:
        """Returns the bytes of `num_workers` workers, of which `num_drafts` load the draft model,
        and of `num_encode` encode workers."""
        of_others = num_drafts * self.draft_bytes + num_encode * self.tower_bytes
        return num_workers * self.num_bytes + of_others


def read_memory(
    membership: Path = Path("/proc/self/cgroup"), hierarchy: Path = Path("/sys/fs/cgroup")
) -> Memory:
    """Returns the memory that this process can use. Candidates are the machine and each enclosing
    cgroup (version 2); the one with the least free memory is returned."""
    machine = psutil.virtual_memory()
    found = [Memory("this machine", machine.available, machine.total)]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found[0]
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if own is not None:
        inner = hierarchy / own
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(hierarchy) and (limited := _cgroup_memory(folder)):
                found.append(limited)
    return min(found, key=lambda memory: memory.free_bytes)


def _cgroup_memory(folder: Path) -> Memory | None:
    """Returns the memory of one cgroup; None if it has no limit. Cached file pages count as free,
    because the operating system can reclaim them."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # The cgroup has no memory controller, or its limit is "max".
        return None
    used -= int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return Memory("this container", max(0, limit - used), limit)


def worker_need(
    config: EngineOptions,
    model: ModelFolder | None,
    *,
    dtype: str = "",
    kernels: str = "",
    draft: ModelFolder | None = None,
) -> Need:
    """Returns the memory that one worker needs with these settings.

    `dtype` and `kernels` are the engine's choices. If they are empty, the choices of an engine on
    this machine's CPU are assumed. `model` is None while the model is unknown. `draft` is the draft
    model, if there is one."""
    if model is not None and draft is not None:
        need = worker_need(config, model, dtype=dtype, kernels=kernels)
        num_blocks = _divided(config, model, dtype).most_blocks
        of_draft = worker_need(replace(draft_options(config), num_blocks=num_blocks), draft)
        return replace(need, draft_bytes=of_draft.pool_bytes + of_draft.weights_bytes)
    need = _text_need(config, model, dtype=dtype, kernels=kernels)
    takes_images = config.tensor_parallel == 1 and (kernels or config.kernels) != "triton"
    if model is None or not takes_images:
        return need
    return replace(need, tower_bytes=tower_bytes(model))


def _text_need(
    config: EngineOptions, model: ModelFolder | None, *, dtype: str, kernels: str
) -> Need:
    """Returns the memory of a worker that computes no images. The arguments are those of
    `worker_need`."""
    dtype = dtype or compute_dtype(config, has_bfloat16=cpu_has_bfloat16())
    option = pool_option(config)
    if config.num_blocks is None:
        pool_bytes = config.kv_bytes
    else:
        pool_bytes = 0
        if model is not None:
            pool_bytes = _divided(config, model, dtype).pool_bytes
    if model is not None and config.state_dtype != "float32":
        pool_bytes += _layout(config, model, dtype).working_bytes(config.max_num_seqs)
    if config.kv_host_bytes:
        option += f" --kv-host-memory {config.kv_host_bytes}"
        pool_bytes += config.kv_host_bytes
    if model is None:
        return Need(option, pool_bytes, 0)
    is_stored = not (model.is_gguf or model.config.quantization or model.config.is_mxfp4)
    num_weights = model.num_weights if is_stored or model.is_gguf else num_parameters(model.config)
    shape = model.config
    if shape.implementation != "tandem":
        kernels = "torch"
    kernels = kernels or config.kernels
    if keeps_quantized(config, model, kernels):
        weights_bytes = _quantized_bytes(model, kernels, dtype)
        if not model.is_gguf and DTYPE_BYTES[dtype] > DTYPE_BYTES[shape.torch_dtype]:
            # The embedding and the output matrix are rarely quantized. They are counted in the
            # compute dtype, to which they are converted.
            weights_bytes += 2 * shape.vocab_size * shape.hidden_size * DTYPE_BYTES[dtype]
        return Need(option, pool_bytes, weights_bytes)
    if kernels in ("torch", "triton"):
        return Need(option, pool_bytes, num_weights * DTYPE_BYTES[dtype])
    packed_bytes = num_weights * (1 if config.weights == "int8" else DTYPE_BYTES[dtype])
    num_converted = 0
    if dtype != shape.torch_dtype or not is_stored:
        num_converted = max(shape.vocab_size * shape.hidden_size, num_weights // shape.num_layers)
    return Need(option, pool_bytes, packed_bytes + num_converted * DTYPE_BYTES[dtype])


def _divided(config: EngineOptions, model: ModelFolder, dtype: str) -> KvLayout:
    """Returns the layout of the pools. With states, the slots of states add to the blocks."""
    dtype = dtype or compute_dtype(config, has_bfloat16=cpu_has_bfloat16())
    layout = partial(_layout, config, model, dtype)
    step_tokens = config.max_tokens_per_step or STEP_TOKENS
    return divide_pool(layout, config, step_tokens=step_tokens)


def _layout(config: EngineOptions, model: ModelFolder, dtype: str, *num_blocks: int) -> KvLayout:
    return model_layout(
        model.config,
        num_blocks,
        block_size=config.block_size,
        dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        computed_dtype=dtype,
        state_dtype=config.state_dtype,
    )


def pool_option(config: EngineOptions) -> str:
    """Returns the option that sets the size of the KV pool, and its value, for messages."""
    if config.num_blocks is None:
        return f"--kv-memory {config.kv_bytes}"
    return f"--num-blocks {config.num_blocks}"


def keeps_quantized(config: EngineOptions, model: ModelFolder, kernels: str) -> bool:
    """Returns whether quantized weights stay quantized in memory.

    If the setting `weights` is not auto, the weights are converted. Otherwise the kernels decide:
    - torch and triton: weights stay quantized if `dtype` is auto.
    - native, fp8 weights: weights stay quantized.
    - native, other formats: weights stay quantized if `dtype` is auto and `numerics` is fast. Exact
      numerics need a conversion, because these kernels also quantize activations.
    """
    is_quantized = model.is_gguf or model.config.is_mxfp4 or model.config.quantization is not None
    if config.weights != "auto" or not is_quantized:
        return False
    if kernels in ("torch", "triton"):
        return config.dtype == "auto"
    return model.config.is_fp8 or (config.dtype == "auto" and config.numerics == "fast")


def _quantized_bytes(model: ModelFolder, kernels: str, dtype: str) -> int:
    """Returns the memory of weights that stay quantized."""
    is_native = kernels not in ("torch", "triton")
    # 1.04 is for fp8, if 128 inputs of a row share a scale of 4 bytes.
    growth = 1.0 if is_native else 1.04
    if model.is_gguf:
        # gguf is imported here because it takes long, and most models do not need it.
        from tandem.models.gguf.loaded_bytes import loaded_bytes

        stored_bytes = loaded_bytes(
            model.weight_files,
            is_native=is_native,
            dtype_bytes=DTYPE_BYTES[dtype],
            has_latents=model.config.latent is not None,
        )
    else:
        stored_bytes = sum(file.stat().st_size for file in model.weight_files)
        if is_native and model.config.quantization is not None:
            growth = model.config.quantization.growth_max
    return int(stored_bytes * growth)


def why_too_much(
    need: Need, num_workers: int, memory: Memory, num_encode: int = 0, *, num_drafts: int = 1
) -> str:
    """Returns one line with the needed and the free memory and a remedy; "" if the need fits.
    `num_drafts` of the workers load the draft model, if there is one. Beside the workers,
    `num_encode` encode workers start, which need a vision tower each."""
    encode_bytes = num_encode * need.tower_bytes
    draft_bytes = num_drafts * need.draft_bytes
    needed_bytes = need.bytes_of(num_workers, num_drafts=num_drafts, num_encode=num_encode)
    if needed_bytes <= memory.free_bytes:
        return ""
    parts = f"{_gb(need.pool_bytes)} pool"
    if need.weights_bytes:
        parts += f" + {_gb(need.weights_bytes)} weights"
    if need.tower_bytes:
        parts += f" + {_gb(need.tower_bytes)} vision tower"
    who = "a worker needs" if num_workers == 1 else f"{num_workers} workers need"
    product = parts if num_workers == 1 else f"{num_workers} x ({parts})"
    if draft_bytes:
        many = "the draft model" if num_drafts == 1 else f"{num_drafts} draft models"
        product += f" + {_gb(draft_bytes)} for {many}"
    if encode_bytes:
        product += f" + {_gb(encode_bytes)} for {num_encode} encode workers"
    fewer = "" if num_workers == 1 else " or start fewer workers"
    return (
        f"{need.option}: {who} {product} = {_gb(needed_bytes)}; {memory.place} has "
        f"{_gb(memory.free_bytes)} free. Lower {need.option.split()[0]}{fewer}"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
