"""Settings of an engine: how its model is computed, its KV pool and its scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from tandem.common.config.groups import ENGINE, MEASUREMENT, ModelImpl, ModelName, ModelRevision
from tandem.common.kv_tiers import KV_TIERS
from tandem.common.options import (
    Bounds,
    Constant,
    Count,
    Options,
    Positive,
    PositiveOrNone,
    PositiveSize,
    Seconds,
    Size,
    SizeOrNone,
    Text,
    option_name,
)
from tandem.common.speculation import parse_speculation
from tandem.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
KvDtype = Literal["auto", "bfloat16", "float32", "int8", "fp8_e4m3", "k8v4", "int4"]
StateDtype = Literal["float32", "bfloat16", "int8"]
KvTierPolicy = Literal["lru", "prefix", "priority", "value"]
Numerics = Literal["fast", "invariant"]
Kernels = Literal["auto", "native", "torch", "triton"]
WeightFormat = Literal["auto", "int8"]
# Memory of the KV pool on a CPU, in bytes, if neither --kv-memory nor --num-blocks is given.
KV_BYTES_ON_CPU = 1 << 30
GpuShare = Annotated[float, Bounds(above=0, most=1)]
PinShare = Annotated[float, Bounds(least=0, most=1)]


ADAPTER_NAME = r"[A-Za-z0-9._:/-]{1,128}"


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Parses NAME=PATH,... from one or several texts. Returns absolute paths by name. Raises
    ConfigError."""
    found: dict[str, str] = {}
    for entry in filter(None, ",".join(texts).split(",")):
        name, _, path = entry.partition("=")
        if not re.fullmatch(ADAPTER_NAME, name) or not path:
            raise ConfigError(
                f"lora has the entry {entry!r}; an entry must be NAME=PATH with a NAME of 1 to "
                "128 letters, digits and . _ : / -"
            )
        if name in found:
            raise ConfigError(f"lora has the name {name!r} twice; each adapter needs its own name")
        found[name] = str(Path(path).expanduser().absolute())
    return found


def _read_adapters(_: object, tokens: Sequence[Token]) -> dict[str, str]:
    return parse_adapters([token.value for token in tokens])


_Adapters = Parameter(
    metavar="NAME=PATH,...",
    converter=_read_adapters,
    n_tokens=1,
    accepts_keys=False,
    negative=(),
    show_default=False,
)


@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """The options of an engine: how its model is computed, its KV pool and its scheduler."""

    device: Device = "auto"
    """Device that computes the model. auto: the GPU if there is one, else the CPU."""
    dtype: Dtype = "auto"
    """Data type of the computation. auto: bfloat16 if the hardware supports bfloat16, else float32;
    quantized weights stay quantized. bfloat16, float32: quantized weights are converted to this
    type when the model is loaded. Exception: fp8 weights stay fp8 on native kernels."""
    kv_dtype: KvDtype = "auto"
    """Data type of the KV pool. auto: the same as the computation. int8 and fp8_e4m3 take about
    half of the memory of bfloat16, k8v4 (keys of 8 bits, values of 4 bits) 40%, and int4 28%. k8v4
    and int4 need native or torch kernels. int4 runs a calibration when the model starts for the
    first time. For models with DeepSeek's latent attention, int8 is the only quantized type."""
    state_dtype: StateDtype = "float32"
    """Data type of the states of linear attention that are cached or sent to other workers.
    bfloat16 takes half of the memory of float32, and int8 about a quarter. Steps compute in
    float32. bfloat16 and int8 need a CPU and one rank."""
    numerics: Numerics = "fast"
    """invariant: compute in float32, so that an answer does not depend on other requests in the
    batch. fast: faster, without this guarantee."""
    kernels: Kernels = "auto"
    """Kernels that compute the model: native (C++, for CPUs), triton (for GPUs) or torch (slowest,
    for both). auto: the fastest kernels that work here."""
    weights: WeightFormat = "auto"
    """Format of the weights in memory. auto: as --dtype says. int8: takes less memory and needs
    native kernels."""
    block_size: Positive = 16
    """Number of tokens in a KV block."""
    kv_bytes_max: Annotated[SizeOrNone, Parameter(name="--kv-memory")] = None
    """Memory of a worker's KV pool, such as 4GiB. 0: 1GiB on CPUs; on GPUs, the memory that
    --gpu-memory-utilization leaves after weights, steps and CUDA graphs."""
    num_blocks: PositiveOrNone = None
    """Number of blocks in the KV pool. 0: as many as --kv-memory holds."""
    gpu_memory_utilization: GpuShare = 0.9
    """Share of a GPU's total memory for a worker's weights, steps, CUDA graphs and KV pool, above
    0 and up to 1. `tandem up` divides the share among the workers on one GPU. --kv-memory and
    --num-blocks set the size of the KV pool independently of the share."""
    kv_host_bytes: Annotated[Size, Parameter(name="--kv-host-memory")] = 0
    """Host memory of each worker for copies of KV blocks, such as 8GiB. 0: no copies in host
    memory."""
    kv_disk_path: Text = ""
    """Folder for copies of KV blocks on disk. Default: no copies on disk."""
    kv_disk_bytes: Annotated[PositiveSize, Parameter(name="--kv-disk-size")] = 16 << 30
    """Disk space in --kv-disk-path for each worker's copies of KV blocks, such as 16GiB."""
    kv_store_url: Text = ""
    """URL of an object store, s3://BUCKET/PREFIX, for copies of KV blocks. All workers of a model
    share these copies. Default: none."""
    kv_store_endpoint: Text = ""
    """URL of the object store's server. Default: AWS's server for the region."""
    kv_store_region: Text = ""
    """Region of the object store. Default: the variable AWS_REGION, else us-east-1."""
    kv_store_credentials: Text = ""
    """File with the object store's credentials, in the format of ~/.aws/credentials, section
    [default]. Default: AWS_ACCESS_KEY_ID and related variables, else the credentials of the
    machine."""
    kv_key_file: Text = ""
    """File with keys for copies of KV blocks on disk and in the object store. Each line is one key
    of 64 hexadecimal digits. The first key encrypts new copies; all keys decrypt old copies.
    Default: no encryption."""
    kv_tier_policy: KvTierPolicy = "value"
    """Which KV blocks are copied to host memory, disk and the object store, and which copies are
    dropped first. value: copies blocks that were used twice or are likely to be reused; drops
    copies that are rarely used and cheap to recompute. lru, prefix, priority: copy all blocks. lru
    drops the least recently used copy. prefix drops the copy with the most tokens before its block.
    priority drops the copy with the lowest kv_priority, a field of requests."""
    kv_pin_share: PinShare = 0.5
    """Largest share of the KV pool, and of each tier, that requests may protect from eviction: 0
    to 1."""
    max_model_len: PositiveOrNone = None
    """Largest number of tokens in a prompt and its answer together. 0: the model's own limit."""
    max_num_seqs: Positive = 64
    """Largest number of requests that a worker computes at the same time."""
    max_tokens_per_step: PositiveOrNone = None
    """Largest number of tokens that one step computes. 0 means 512 on CPUs, and about 16 for each
    multiprocessor on GPUs, such as 2048 on an H100."""
    itl_target_s: Seconds = 0.1
    """Target for the time between two tokens of a request, in seconds. To meet the target, workers
    compute long prompts in parts. 0: off."""
    itl_limit_s: Seconds = 0.0
    """Limit for the time between two tokens of a request, in seconds. A request waits if its
    start would exceed the limit. 0: off."""
    shared_wait_s: Seconds = 10.0
    """Longest wait, in seconds, for KV blocks that another request is already computing. 0: no
    wait."""
    speculative_config: Text = "off"
    """Whether a decode step also verifies proposed tokens, so that it may yield several tokens. The
    answers stay the same. auto: proposes text that repeats the prompt, the answer or recent answers
    to the same tenant, as far as it saves time. off: no proposals. Or a JSON object with vLLM's
    keys, such as {"method": "ngram", "num_speculative_tokens": 8}; the methods are ngram, suffix
    and draft_model."""
    lora: Annotated[Mapping[str, str], _Adapters] = field(default_factory=dict)
    """LoRA adapters in PEFT's format, as NAME=FOLDER. The option can be repeated."""
    max_loras: Count = 8
    """Largest number of LoRA adapters in a worker's memory. 0: no adapters."""
    max_lora_rank: Positive = 64
    """Largest rank of a LoRA adapter; adapters with a larger rank are refused."""
    queue_max: Positive = 256
    """Largest number of requests that wait at a worker. The worker refuses further requests."""
    num_threads: Annotated[Positive, Parameter(name="--threads")] = 1
    """Number of CPU threads of a worker. With --tensor-parallel, number of CPU threads of each
    rank."""
    tensor_parallel: Positive = 1
    """Number of processes (ranks) that compute each step of a worker together. Each rank has its
    share of the model's weights. On GPUs, each rank needs a GPU of its own."""
    expert_parallel: bool = False
    """With --tensor-parallel: divide the experts of each layer among the ranks. Each expert is then
    whole on one rank. Without this option, each rank has a part of every expert. Needs torch or
    Triton kernels and --numerics fast."""
    ranks_share_gpu: Annotated[bool, Parameter(group=MEASUREMENT)] = False
    """All ranks of --tensor-parallel compute on one GPU, slowly. For tests on a machine with one
    GPU."""
    ranks_own_pools: Annotated[bool, Parameter(group=MEASUREMENT)] = False
    """Each rank of --tensor-parallel has a KV pool of its own, as on GPUs. For tests of torch
    kernels on a machine without GPUs."""

    @property
    def has_default_pool(self) -> bool:
        """True if no option gives the size of the KV pool."""
        return self.kv_bytes_max is None and self.num_blocks is None

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool if `num_blocks` is None. On a GPU, the runner sets `kv_bytes_max`
        before this is read (`Runner.with_pool_size`)."""
        return self.kv_bytes_max or KV_BYTES_ON_CPU

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that keep copies of the pool's blocks, fastest first."""
        return tuple(tier.name for tier in KV_TIERS if getattr(self, tier.option))

    @property
    def has_tiers(self) -> bool:
        """True if a tier keeps copies of the pool's blocks."""
        return bool(self.tiers)

    @property
    def tier_folders(self) -> dict[str, Path]:
        """Folders of the tiers that are switched on and keep files, by the name of their field.
        Raises ConfigError for a path that begins with the home folder of an unknown user."""
        given = {tier.option: getattr(self, tier.option) for tier in KV_TIERS if tier.is_folder}
        return {name: _expanded(name, path) for name, path in given.items() if path}

    def check_together(self) -> None:
        if self.numerics == "invariant" and "bfloat16" in (self.dtype, self.kv_dtype):
            raise ConfigError(
                "numerics invariant computes in float32, so dtype and kv-dtype must not be "
                "bfloat16; set dtype and kv-dtype to auto or float32"
            )
        if self.numerics == "invariant" and self.state_dtype != "float32":
            raise ConfigError(
                f"numerics invariant needs states in float32, but state-dtype is "
                f"{self.state_dtype}; set state-dtype to float32"
            )
        if self.state_dtype != "float32" and self.tensor_parallel > 1:
            raise ConfigError(
                f"state-dtype is {self.state_dtype}; it must be float32 with several ranks "
                "(tensor-parallel)"
            )
        if self.ranks_share_gpu and self.tensor_parallel == 1:
            raise ConfigError(
                "ranks-share-gpu is set, but tensor-parallel is 1; set tensor-parallel to at least "
                "2, or remove ranks-share-gpu"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "expert-parallel is set, but tensor-parallel is 1; set tensor-parallel to at least "
                "2, or remove expert-parallel"
            )
        if self.expert_parallel and self.numerics == "invariant":
            raise ConfigError(
                "expert-parallel cannot be used with numerics invariant, because sums would depend "
                "on the number of ranks; set numerics to fast, or remove expert-parallel"
            )
        sealed = [tier.option for tier in KV_TIERS if tier.is_sealed]
        if self.kv_key_file and not any(getattr(self, option) for option in sealed):
            names = " and ".join(map(option_name, sealed))
            raise ConfigError(
                f"kv-key-file is set without {names}, so there are no KV blocks to encrypt; set "
                "one of these options, or remove kv-key-file"
            )
        for (one, first), (other, second) in combinations(self.tier_folders.items(), 2):
            if _overlap(first, second):
                raise ConfigError(
                    f"{option_name(one)} is {first} and {option_name(other)} is {second}; each KV "
                    "tier needs a folder of its own, outside the other tiers' folders"
                )
        for name in ("kv_store_endpoint", "kv_store_region", "kv_store_credentials"):
            if getattr(self, name) and not self.kv_store_url:
                raise ConfigError(
                    f"{option_name(name)} is set without kv-store-url; set both, or neither"
                )
        parse_speculation(self.speculative_config)
        if self.lora and not self.max_loras:
            raise ConfigError(
                "lora lists adapters, but max-loras is 0; set max-loras to at least 1"
            )


def _expanded(name: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{option_name(name)} is {path}; the path must not begin with ~, because the home "
            "folder of the user is not known"
        ) from error


def _overlap(one: Path, other: Path) -> bool:
    """Returns True if the folders are the same, or if one of them is inside the other."""
    one, other = one.resolve(), other.resolve()
    return one.is_relative_to(other) or other.is_relative_to(one)


# A token is forced if a grammar allows no other token at its position. After a sampled token, up to
# this many forced tokens are appended in the same step. With more, the next step would take longer
# and delay other sequences.
FORCED_MAX = 16


@Parameter(name="*", group=ENGINE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The settings of one engine: a model, its KV pool and its scheduler."""

    model: ModelName
    model_revision: ModelRevision = ""
    model_impl: ModelImpl = "auto"
    # The setting does not change which tokens are generated.
    forced_max: Constant[int] = FORCED_MAX
    # True: the engine's reports of stored blocks include the blocks' token ids, which KV events
    # need.
    report_block_tokens: Constant[bool] = False
    # A rank that is stopped (SIGSTOP) for so many seconds is killed, which ends the engine. A
    # worker sets its own engine_hang_timeout_s.
    rank_stopped_s_max: Constant[float] = 60.0
