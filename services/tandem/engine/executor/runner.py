"""Runs a model with its KV pools on one device: computes a step's batch and returns logits.

The runner chooses the device, dtypes and kernels from the settings and the hardware, loads the
weights and owns the pools. It does no scheduling. It does not check the block tables of a batch.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import compute_dtype, cpu_has_bfloat16
from tandem.engine.cache.layout.kv_groups import (
    KvGroup,
    KvLayout,
    model_layout,
)
from tandem.engine.cache.layout.pool_memory import create_shared, own_pages, size_shared
from tandem.engine.cache.layout.row_layout import RowLayout
from tandem.engine.cache.layout.state_layout import StateLayout
from tandem.engine.executor.card_dtypes import check_dtypes, is_old
from tandem.engine.executor.collectives import ALONE, Collectives
from tandem.engine.executor.encoder import encoder_steps
from tandem.engine.executor.gpu_memory import GpuMemory
from tandem.engine.executor.kernel_choice import choose_kernels, why_no_triton_adapters
from tandem.engine.executor.largest_step import largest_step
from tandem.engine.executor.native.decoder import NativeDecoder, SentStep
from tandem.engine.executor.native.lora import PackedLora
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.ranks.cores import pin_to_share
from tandem.engine.executor.ranks.members import Members
from tandem.engine.executor.ranks.pool_bytes import RankPoolBytes
from tandem.engine.executor.ranks.shared_memory import SharedMemoryCollectives
from tandem.engine.executor.ranks.tier_copies import (
    CopyServer,
    RankBlocks,
    RankCopies,
    memory_bytes,
)
from tandem.engine.executor.step_tokens import default_step_tokens
from tandem.engine.executor.torch.steps import DecoderSteps, TorchSteps
from tandem.engine.executor.weights.kv_scales import fixed_scales
from tandem.engine.executor.weights.load import OnProgress, ignore_progress, load_weights
from tandem.engine.executor.weights.lora import LoraWeights, load_lora
from tandem.engine.executor.weights.share import Share, share_of_lora
from tandem.engine.executor.working_states import WorkingStates, with_working_slots
from tandem.engine.memory import (
    Need,
    keeps_quantized,
    read_memory,
    why_too_much,
    worker_need,
)
from tandem.engine.runner_protocol import DrawnTokens
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.tiers.storage import Bytes
from tandem.errors import ConfigError
from tandem.models.draft import draft_options, find_draft
from tandem.models.folder import ModelFolder
from tandem.models.limits import (
    check_settings,
    max_context,
    why_no_speculation,
    why_not_pools_of_ranks,
)
from tandem_kernels.kv_cache import StaticKv, make_pool
from tandem_kernels.kv_int4_keys import KeyChannels
from tandem_kernels.logprobs import Logprobs
from tandem_kernels.native.library import BITS_VERSION
from tandem_kernels.row_pool import RowPool
from tandem_kernels.sampling import Draw
from tandem_kernels.state_pool import PackedStatePool, Pool, StatePool

if TYPE_CHECKING:
    from tandem.common.adapter import Adapter
    from tandem.engine.executor.triton.steps import TritonSteps

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# On a processor where only torch multiplies bfloat16 in hardware (arm64), the native kernels
# compute steps of a bfloat16 model with at most this many tokens, and torch computes larger steps.
# A small step spends most of the time reading weights, which the native kernels do faster.
_NATIVE_TOKENS_MAX = 16
# Instruction set -> another set whose fp32 code is the same, so that both compute the same bits.
_FP32_AS = {"amx": "avx512", "avx512_bf16": "avx512"}


def _ignore(_: str) -> None:
    pass


class HostTokens(NamedTuple):
    """Sampled tokens that are on the host already."""

    token_ids: list[int]

    def wait(self) -> list[int]:
        """Returns the token ids."""
        return self.token_ids


class TokensOfRanks(NamedTuple):
    """Sampled tokens of a step that several ranks have computed."""

    tokens: DrawnTokens
    members: Members

    def wait(self) -> list[int]:
        """Returns the token ids. Raises RankEnded if a rank has ended, because the step's results
        may be wrong then."""
        token_ids = self.tokens.wait()
        self.members.check()
        return token_ids


class LoadedAdapter(NamedTuple):
    """A LoRA adapter in the form of each decoder that the runner may use."""

    weights: LoraWeights
    packed: PackedLora | None  # the form for the C++ decoder; None: the runner has no C++ decoder


class ModelRunner:
    """Runs the steps of one model. After `allocate`, one thread at a time may call `forward`."""

    # The memory of all KV pools, one pool after the other: uint8 [bytes of all pools]. `allocate`
    # creates it.
    kv: torch.Tensor
    pools: list[Pool]  # one pool for each KV group
    whole_layout: KvLayout  # of blocks with the heads of all ranks; set by `allocate`
    # The bytes of whole blocks, if each rank has a pool of its own. `allocate` creates it.
    blocks: RankPoolBytes

    def __init__(
        self,
        folder: ModelFolder,
        config: EngineConfig,
        *,
        pool_fd: int | None = None,
        on_progress: OnProgress = ignore_progress,
        on_rank_end: Callable[[str], object] = _ignore,
        member_of: RankMemory | None = None,
        gpu_wait_s: float = 0.0,
        rank_service: messages.RankService | None = None,
    ) -> None:
        """Loads the weights, and calls `on_progress` during the load. If the device is a CPU, the
        pools are allocated in the memfd with the file descriptor `pool_fd`, so that another process
        can map the pools, too.

        With `config.tensor_parallel` more than 1, this is rank 0 and starts the other ranks. If one
        of them ends early, `on_rank_end` is called in a thread, and each further step raises
        RankEnded. `member_of` is given in the other ranks: the memory that they share with rank 0.
        If each rank has a KV pool of its own, each of the other ranks runs `rank_service`
        (`Members`), and `service_pipes` has the pipes to them.

        If the GPU's memory is large enough but too little of it is free, waits at most `gpu_wait_s`
        seconds for it, because the memory of a process that was killed is not free at once.

        Raises ConfigError for settings that this machine or model does not support, and
        UnsupportedModel for a checkpoint that does not match its config.
        """
        torch.set_num_threads(config.num_threads)
        self.rank = rank = 0 if member_of is None else member_of.rank
        self.device = choose_device(config, rank)
        dtype_name = compute_dtype(config, has_bfloat16=has_bfloat16(self.device))
        stored = folder.config.torch_dtype
        check_dtypes(config, self.device, dtype=dtype_name, checkpoint_dtype=stored)
        self._kv_dtype = dtype_name if config.kv_dtype == "auto" else config.kv_dtype
        self.kv_dtype_name = self._kv_dtype
        self._state_dtype = config.state_dtype
        self.max_model_len = max_context(config, folder.config)
        self.vocab_size = folder.config.vocab_size
        self._model_config = model = folder.config.for_contexts(self.max_model_len)
        check_settings(config, model)
        self._block_size = config.block_size
        self._lora_rank_max = config.max_lora_rank
        self._pool_fd = pool_fd
        draft = find_draft(config, folder) if member_of is None else None
        if draft is not None and self.device.type == "cuda":
            raise ConfigError(
                "speculative-config has a draft model, which GPUs do not compute yet; set device "
                "to cpu, or speculative-config to auto or off"
            )
        kernels = choose_kernels(config, self.device, model)
        int8 = config.weights == "int8"
        keeps = keeps_quantized(config, folder, kernels)
        # Kernels that dequantize weights before a product all compute the same bits. The native
        # kernels for integer formats multiply the quantized numbers directly, so they compute
        # other bits.
        has_own_bits = keeps and kernels == "native" and not folder.config.is_fp8
        # `dtype_name` has a suffix, such as "+int8", for each choice that changes the bits of KV.
        # Workers with different `dtype_name` do not exchange blocks.
        form = "+int8" * int8 + "+blocks" * has_own_bits
        is_other = model.implementation != "tandem"
        form += f"+{model.implementation}" * is_other
        self.dtype_name = dtype_name + form + "+long-rope" * model.is_long
        self._dtype = _DTYPES[dtype_name]
        self.numerics_name: str = config.numerics
        if config.numerics == "fast":  # whichever kernels compute: workers may mix them
            self.numerics_name = f"fast-{BITS_VERSION}"
        self.tokens_per_step = default_step_tokens(self.device)
        self.why_no_budgets = ""
        if model.encoder is not None:
            self.why_no_budgets = "the model is an encoder"
        elif is_other:
            self.why_no_budgets = "the model is computed through transformers"
        elif kernels == "triton":
            self.why_no_budgets = (
                "the Triton kernels do not support KV budgets; the native and torch kernels do"
            )
        elif kernels == "torch" and config.tensor_parallel > 1:
            self.why_no_budgets = (
                "several ranks of torch kernels do not support KV budgets; native kernels do, and "
                "so does tensor-parallel 1"
            )
        if model.has_states:
            self.why_no_budgets = "some layers of the model keep a state in place of KV"
        if model.index_keys is not None:
            self.why_no_budgets = "the model has sparse attention"
        if model.shared_kv is not None:
            self.why_no_budgets = "the model has compressed attention"
        self.why_no_speculation = why_no_speculation(config, model)
        if config.speculative_config == "auto" and self.why_no_speculation:
            log.info("no request speculates, because %s", self.why_no_speculation)
        # On a CPU, the host's threads are the device, so there is nothing to overlap.
        self._has_triton = kernels == "triton"
        self.takes_embeddings = kernels != "triton" and not is_other
        self.launches_ahead = kernels == "triton" and self.device.type == "cuda"
        # Native ranks write their logits to their columns of one array, which rank 0 reads.
        self.shards_logits = kernels != "native" and config.tensor_parallel > 1
        self._drawn = HostTokens([])
        self._num_seqs_max = config.max_num_seqs
        is_cuda = self.device.type == "cuda"
        self._is_rank = config.tensor_parallel > 1
        self.num_pools = config.tensor_parallel if have_own_pools(config, self.device) else 1
        self._has_own_pool = self.num_pools > 1
        if self._has_own_pool and kernels == "native":
            raise ConfigError(
                "ranks-own-pools cannot be used with native kernels, because native kernels need "
                "one KV pool for all ranks; set kernels to torch"
            )
        if self._has_own_pool and (why := why_not_pools_of_ranks(model)):
            raise ConfigError(
                f"tensor-parallel is {config.tensor_parallel}; it must be 1 for this model if each "
                f"rank has a KV pool of its own, as on GPUs: {why}"
            )
        self._own_config = Share(rank, config.tensor_parallel).config(model)
        # Ranks that share a GPU would measure each other's memory.
        self._gpu = (
            GpuMemory(self.device, config) if is_cuda and not config.ranks_share_gpu else None
        )
        self._given_pool_bytes = 0
        # On CPUs, rank 0 checks for all ranks, before any of them loads weights.
        if self._gpu is not None or (rank == 0 and not is_cuda):
            self._given_pool_bytes = _check_memory(
                config,
                folder,
                self._gpu,
                dtype=dtype_name,
                kernels=kernels,
                gpu_wait_s=gpu_wait_s,
                block_share=self._own_config.num_kv_heads / model.num_kv_heads,
                draft=draft,
            )
        self._static_kv = _static_kv(folder, self._kv_dtype)
        if self._static_kv is not None:
            self.kv_dtype_name = f"{self._kv_dtype}-{self._static_kv.digest}"
        if self._state_dtype != "float32":
            self.kv_dtype_name += f"-states-{self._state_dtype}"
        self._working: dict[int, WorkingStates] = {}  # of each state group; set by `allocate`
        self._members: Members | None = None
        self._memory = member_of
        if config.tensor_parallel > 1 and member_of is None:
            self._pool_fd = fd = create_shared() if pool_fd is None else pool_fd
            if fd is None:
                raise ConfigError(
                    f"tensor-parallel is {config.tensor_parallel}, but ranks cannot share memory, "
                    "because this system has no memfd; set tensor-parallel to 1"
                )
            end = partial(self._end_with_rank, on_rank_end)
            service = rank_service if self._has_own_pool else None
            self._members = Members(folder, config, fd, end, service)
            pin_to_share(config, 0)
            self._memory = self._members.memory
        memory = self._memory
        self._host_ranks: SharedMemoryCollectives | None = None
        if memory is not None and kernels != "native":
            # Quantized matrices are divided by outputs only: a group of inputs has one scale.
            splits = config.numerics == "fast" and not keeps
            self._host_ranks = SharedMemoryCollectives(
                memory, splits_inputs=splits, splits_experts=config.expert_parallel
            )
        self._ranks = self._collectives(config)
        self._share = self._ranks.share
        self._small: NativeDecoder | DecoderSteps | TritonSteps
        self._large: NativeDecoder | DecoderSteps | TritonSteps
        # Name of the kernels, with the instruction set of native kernels, as in "native (avx512)".
        self.kernels_name: str = kernels
        self._triton: TritonSteps | None = None
        with self._explains("the weights were loaded"):
            weights = None
            if not is_other:
                weights = load_weights(
                    folder.weight_files,
                    model,
                    dtype=_DTYPES[dtype_name],
                    device=self.device,
                    kept_for=kernels if keeps else "",
                    share=self._share,
                    on_progress=on_progress,
                )
            if model.encoder is not None:
                self._small = self._large = encoder_steps(
                    folder,
                    model,
                    dtype=self._dtype,
                    device=self.device,
                    on_progress=on_progress,
                )
                self.kernels_name = "torch (encoder)"
            elif weights is None:
                # Imported here because importing transformers takes seconds.
                from tandem.engine.executor.transformers.steps import transformers_steps

                self._small = self._large = transformers_steps(
                    folder,
                    model,
                    block_size=config.block_size,
                    dtype=self._dtype,
                    device=self.device,
                    on_progress=on_progress,
                )
                self.kernels_name = "torch (transformers)"
            elif kernels == "triton":
                # Imported here because Triton is not installed on every machine.
                from tandem.engine.executor.triton.steps import TritonSteps

                self._small = self._large = self._triton = TritonSteps(
                    model,
                    weights,
                    max_num_seqs=config.max_num_seqs,
                    max_model_len=self.max_model_len,
                    step_tokens=config.max_tokens_per_step or self.tokens_per_step,
                    num_adapters_max=config.max_loras,
                    lora_rank_max=config.max_lora_rank,
                    records_adapters=bool(config.lora),
                    ranks=self._ranks,
                )
            elif kernels == "native":
                self._small = self._large = native = NativeDecoder(
                    model, weights, num_threads=config.num_threads, int8=int8, memory=memory
                )
                self.kernels_name = f"native ({native.instructions or 'plain'})"
                # With invariant numerics, the bits still depend on the instruction set.
                if config.numerics == "invariant":
                    name = native.instructions or ""
                    name = _FP32_AS.get(name, name)
                    self.numerics_name = f"invariant-{BITS_VERSION}-{name}"
                widens = dtype_name == "bfloat16" and not native.multiplies_bf16
                if widens and has_bfloat16(self.device) and not int8 and not keeps and not memory:
                    self._large = TorchSteps(model, weights, config.numerics)
            else:
                self._small = self._large = TorchSteps(model, weights, config.numerics, self._ranks)
        if self._gpu is not None:
            self._gpu.weights_loaded()
        if self._members is not None:
            self._members.wait_until_loaded()
        self.draft: ModelRunner | None = None
        if draft is not None:
            named = replace(draft_options(config), model=str(draft.path), model_revision="")
            self.draft = ModelRunner(draft, named, on_progress=on_progress)

    def _collectives(self, config: EngineConfig) -> Collectives:
        """Returns how the decoder exchanges activations with other ranks. The native decoder does
        so by itself."""
        if self._host_ranks is None:
            return ALONE
        if self.device.type == "cpu" or config.ranks_share_gpu:
            return self._host_ranks
        # Imported here because only ranks on GPUs need torch.distributed.
        from tandem.engine.executor.ranks.nccl import NcclCollectives

        return NcclCollectives(self._host_ranks, self.device)

    def _explains(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self._gpu is None else self._gpu.explains(doing)

    def _end_with_rank(self, on_rank_end: Callable[[str], object], why: str) -> None:
        try:
            on_rank_end(why)
        finally:
            self._ranks.break_up()

    def close(self) -> None:
        """Ends the other ranks, if there are any. The runner cannot be used any more."""
        if self._members is not None:
            self._members.close()

    @property
    def service_pipes(self) -> Sequence[messages.RankPipe]:
        """The pipes to `rank_service` in ranks 1 and up."""
        return self._members.service_pipes if self._members is not None else ()

    @property
    def native(self) -> NativeDecoder | None:
        """The C++ decoder, or None if the native kernels are not used."""
        return self._small if isinstance(self._small, NativeDecoder) else None

    def layout(self, *num_blocks: int) -> KvLayout:
        return model_layout(
            self._model_config,
            num_blocks,
            block_size=self._block_size,
            dtype=self._kv_dtype,
            computed_dtype=str(self._dtype).removeprefix("torch."),
            state_dtype=self._state_dtype,
        )

    def _own_layout(self, *num_blocks: int) -> KvLayout:
        """Returns the layout of this rank's pools."""
        return self.layout(*num_blocks).of_rank(self.num_pools)

    def with_pool_size(self, config: EngineConfig, step_tokens: int) -> EngineConfig:
        """Returns the settings with the size of the KV pool for steps of at most `step_tokens`
        tokens.

        On a CPU, the settings do not change. On a GPU, the largest step and the graphs are measured
        (gpu_memory.py). If the settings do not give the size, the pool gets the memory that is
        left; with several ranks, the memory that is left on the fullest GPU. Raises ConfigError if
        there is not enough memory.
        """
        gpu = self._gpu
        if gpu is None:
            return config
        if self._members is not None:
            self._members.memory.post(messages.Measure(step_tokens))
        with gpu.explains("a step was measured"):
            self._measure(gpu, step_tokens)
            config = gpu.with_pool_size(config, self._given_pool_bytes)
        if self._host_ranks is None or config.num_blocks is not None:
            return config
        return replace(config, kv_bytes_max=self._least(config.kv_bytes))

    def _least(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers, because all ranks compute the same steps on
        pools of as many blocks."""
        return number if self._host_ranks is None else self._host_ranks.least(number)

    def _measure(self, gpu: GpuMemory, step_tokens: int) -> None:
        """Measures the largest step and the graphs on a scratch pool, and frees the pool."""
        one = self._own_layout()
        state_bytes = sum(one.groups[number].layout.block_bytes for number in one.state_groups)
        blocks_bytes = gpu.scratch_bytes - self._num_seqs_max * state_bytes
        batch, num_blocks = largest_step(
            step_tokens,
            self._num_seqs_max,
            max_model_len=self.max_model_len,
            block_size=self._block_size,
            blocks_max=self._least(max(0, blocks_bytes) // (one.block_bytes - state_bytes)),
            num_groups=len(one.groups),
            state_groups=one.state_groups,
        )
        draws = [Draw(1.0, 10, 0.9, 0.1, seed=0, position=0)] * len(batch.slices)
        num_slots = len(batch.slices)
        sizes = [num_slots if group.has_states else num_blocks for group in one.groups]
        pools = self._make_pools(self._own_layout(*sizes))[1]
        triton = self._triton
        if triton is None:
            gpu.measure(
                lambda: None,
                lambda: self._large.sample(self._compute(self._large, batch, pools), draws),
            )
            return
        gpu.measure(
            lambda: triton.prepare(pools),
            lambda: triton.sample(self._compute(triton, batch, pools), draws),
        )
        triton.drop_graphs()

    def allocate(self, *num_blocks: int) -> None:
        """Allocates the pools and fills them with zeros. `num_blocks` has the number of blocks of
        each KV group's pool.

        The zeros are needed because kernels also read elements to which no KV was written. A mask
        gives these elements the weight 0, but 0 times NaN or infinity is NaN.

        Raises ConfigError if there is not enough memory.
        """
        with self._explains("the KV pool was allocated"):
            self.kv, self.pools = self._make_pools(self._own_layout(*num_blocks))
        self.whole_layout = self.layout(*num_blocks)
        if self._has_own_pool:
            assert self._memory is not None
            assert self._host_ranks is not None
            self.blocks = RankPoolBytes(self.kv, self.whole_layout, self._memory, self._host_ranks)
        if self._members is not None:
            self._members.memory.post(messages.Allocate(num_blocks))
        if self._triton is not None:
            with self._explains("the CUDA graphs were recorded"):
                self._triton.prepare(self.pools)
        if self._gpu is not None:
            self._gpu.end()

    def tier_blocks(self, config: EngineConfig) -> Sequence[RankBlocks]:
        """Returns the blocks of the pools of all ranks, through which KV tiers copy them, for each
        KV group. Only if each rank has a pool. Raises ConfigError."""
        assert self._members is not None
        num_bytes = memory_bytes(self.whole_layout, config)
        fd = self._members.tier_memory_fd
        memory = np.frombuffer(size_shared(fd, num_bytes), np.uint8)
        server = self.copy_server(memory)
        post = self._members.memory.post
        post(messages.ServeTiers(num_bytes))

        def mark(number: int) -> None:
            server.mark(number)
            post(messages.MarkWork(number))

        copies = RankCopies(memory, self._members.tier_pipes, mark)
        server.start(copies.own_end)
        return [
            RankBlocks(copies, number, group.layout.block_bytes)
            for number, group in enumerate(self.whole_layout.groups)
        ]

    def copy_server(self, memory: Bytes) -> CopyServer:
        """Returns what copies this rank's heads between its pools and the memory of the tiers."""
        return CopyServer(
            self.kv, self.whole_layout, memory, rank=self.rank, num_ranks=self.num_pools
        )

    def _make_pools(self, layout: KvLayout) -> tuple[torch.Tensor, list[Pool]]:
        """Returns the memory of all pools, and the pools."""
        if self.device.type == "cpu":
            memory = torch.frombuffer(self._pages(layout.pool_bytes), dtype=torch.uint8)
        else:
            memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=self.device)
        parts = torch.split(memory, [group.layout.pool_bytes for group in layout.groups])
        return memory, [
            self._make_pool(part.view(group.layout.num_blocks, -1), number, group)
            for number, (part, group) in enumerate(zip(parts, layout.groups, strict=True))
        ]

    def _make_pool(self, memory: torch.Tensor, number: int, group: KvGroup) -> Pool:
        """Returns the pool of KV group `number` in `memory`, uint8 [num_blocks, bytes of a block].
        If states have another dtype than float32, returns the pool of the running states, in other
        memory."""
        if isinstance(group.layout, StateLayout) and group.layout.dtype != "float32":
            layout = group.layout.working(self._num_seqs_max)
            pages = torch.frombuffer(own_pages(layout.pool_bytes), dtype=torch.uint8)
            pool = StatePool(pages.view(layout.num_blocks, -1), layout)
            self._working[number] = WorkingStates(PackedStatePool(memory, group.layout), pool)
            return pool
        if isinstance(group.layout, StateLayout):
            heads = None if self._has_own_pool else self._share.of(group.layout.num_kv_heads)
            return StatePool(memory, group.layout, heads)
        if isinstance(group.layout, RowLayout):
            return RowPool(memory, group.layout)
        return make_pool(
            memory,
            group.layout,
            self._static_of(group),
            None if self._has_own_pool else self._share.kv_heads(group.layout.num_kv_heads),
        )

    def _pages(self, num_bytes: int) -> mmap.mmap:
        if self._pool_fd is None or self._has_own_pool:
            return own_pages(num_bytes)
        # A rank keeps the descriptor, because it may allocate the pool again.
        return size_shared(os.dup(self._pool_fd) if self._is_rank else self._pool_fd, num_bytes)

    def _static_of(self, group: KvGroup) -> StaticKv | None:
        if self._static_kv is None:
            return None
        static = self._static_kv.of_layers(list(group.layers), self.device)
        if self._has_own_pool and isinstance(static, KeyChannels):
            return static.of_heads(self._share.kv_heads(self._model_config.num_kv_heads))
        return static

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies blocks. Each item of `copies` is (source block id, target block id, KV group).

        The copies run after all earlier steps and before all later steps, also on a CUDA device.
        """
        if self._has_own_pool and self._members is not None:
            self._members.memory.post(messages.CopyBlocks(copies))
        for source, target, group in copies:
            packed = self._working.get(group)
            memory = self.pools[group].memory if packed is None else packed.memory
            memory[target].copy_(memory[source])

    def store_states(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies the states of sequences that steps have computed, as described in
        runner_protocol.py."""
        if not self._working:
            self.copy_blocks(copies)
        for slot, target, group in copies if self._working else ():
            self._working[group].store(slot, target)

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Reads an adapter's files and returns the adapter for `add_adapter`. May be called in any
        thread, also during a step.

        Raises ConfigError or AdapterUnavailable if the adapter cannot be used.
        """
        # Workers without adapters at start may have chosen the Triton kernels.
        if self._has_triton and (why := why_no_triton_adapters(self._model_config)):
            raise ConfigError(f"{why}; start the worker with --lora, or with --kernels torch")
        weights = load_lora(
            adapter,
            self._model_config,
            rank_max=self._lora_rank_max,
            dtype=self._dtype,
            device=self.device,
        )
        if self._share.num_ranks > 1:
            weights = share_of_lora(weights, self._model_config, self._share)
        native = self.native
        packed = native.pack_adapter(weights) if native is not None else None
        if self._members is not None:
            self._members.load_adapter(adapter)
        return LoadedAdapter(weights, packed)

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """Makes an adapter available to the slices of batches. Must not be called during a step."""
        if self._members is not None:
            self._members.memory.post(messages.AddAdapter(loaded.weights.digest))
        if isinstance(self._small, NativeDecoder):
            assert loaded.packed is not None
            self._small.adapters.add(loaded.packed)
        else:
            self._small.add_adapter(loaded.weights)
        if self._large is not self._small:
            assert not isinstance(self._large, NativeDecoder)
            self._large.add_adapter(loaded.weights)

    def drop_adapter(self, digest: str) -> None:
        """Frees an adapter that no slice uses any more. Must not be called during a step."""
        if self._members is not None:
            self._members.memory.post(messages.DropAdapter(digest))
        for steps in (self._small, self._large):
            if isinstance(steps, NativeDecoder):
                steps.adapters.drop(digest)
            else:
                steps.drop_adapter(digest)

    def forward(
        self, batch: StepBatch, on_kv_written: Callable[[], object] | None = None
    ) -> torch.Tensor:
        """Runs a step as described in runner_protocol.py. The logits are valid until the next
        step."""
        self._last = self._small if batch.num_tokens <= _NATIVE_TOKENS_MAX else self._large
        if batch.is_ahead and self._triton is None:
            batch = batch.with_tokens(self._drawn.token_ids)
        # The native decoder itself sends its inputs to the other ranks.
        if self._members is not None and not isinstance(self._last, NativeDecoder):
            self._members.memory.post(batch)
        if self._working:
            batch = with_working_slots(batch, self._working)
        if on_kv_written is not None and self._has_own_pool and self._model_config.has_states:
            # The caller copies states, and other ranks copy theirs only between steps.
            logits = self._compute(self._last, batch, self.pools, None)
            on_kv_written()
            return logits
        return self._compute(self._last, batch, self.pools, on_kv_written)

    def _compute(
        self,
        steps: NativeDecoder | DecoderSteps | TritonSteps,
        batch: StepBatch,
        pools: Sequence[Pool],
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        return steps.forward(batch, pools, on_kv_written)

    def compute_share(self, sent: SentStep, numbers_address: int) -> None:
        """Computes this rank's share of a step that rank 0 has sent."""
        assert self.native is not None
        self.native.compute_share(sent, numbers_address, self.pools)

    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> DrawnTokens:
        """Samples one token for each row of the last step's logits. If `rows` is given, samples
        only for these rows."""
        tokens: DrawnTokens
        if self._triton is not None:
            tokens = self._triton.start_sampling(logits, draws, rows)
        else:
            tokens = self._drawn = HostTokens(self._last.sample(logits, draws, rows))
        return tokens if self._members is None else TokensOfRanks(tokens, self._members)

    def synchronize(self) -> None:
        """Waits until the device has finished all steps, copies and samplings."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> Logprobs:
        """Returns log probabilities computed from rows of the last step's logits. For the row
        `rows[i]`, the result has the log probability of the token `token_ids[i]` and of the
        `num_top` most likely tokens."""
        return self._last.logprobs(logits, rows, token_ids, num_top)

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns a hidden state for each of the given rows of the last step's logits: the output
        of the final norm from which the row was computed, [hidden]."""
        return self._last.final_hidden(rows)


def have_own_pools(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether there are several ranks and each has a KV pool with only its own heads, as on
    GPUs. On CPUs, all ranks map one pool with all heads, unless the settings say otherwise."""
    return config.tensor_parallel > 1 and (device.type == "cuda" or config.ranks_own_pools)


def _static_kv(folder: ModelFolder, kv_dtype: str) -> StaticKv | None:
    if kv_dtype == "int4":
        # Imported here because kv_calibration.py imports a tokenizer library, which need not be
        # installed for GPU benchmarks.
        from tandem.engine.executor.kv_calibration import key_channels

        return key_channels(folder)
    if kv_dtype == "fp8_e4m3":
        return fixed_scales(folder)
    if folder.config.has_kv_scales:
        log.warning(
            "the checkpoint's KV scales for kv-dtype fp8_e4m3 are not used, because kv-dtype is %s",
            kv_dtype,
        )
    return None


def choose_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Returns the device of a rank. On GPUs, rank r uses GPU r of those that the process sees.
    Raises ConfigError if there is none."""
    wanted = config.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda: torch finds no CUDA device; use device=cpu, or run `tandem doctor` to "
            "check the driver"
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    num_ranks = config.tensor_parallel
    if wanted == "cpu" or num_ranks == 1:
        return torch.device(wanted)
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks and not config.ranks_share_gpu:
        raise ConfigError(
            f"tensor-parallel is {num_ranks}, but this process has only {num_gpus} GPUs for the "
            "ranks; lower tensor-parallel, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device(wanted, 0 if config.ranks_share_gpu else rank)
    torch.cuda.set_device(device)  # Triton launches kernels on the thread's current device
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 in hardware. Without hardware support,
    bfloat16 is emulated, which is slower than float32."""
    if device.type == "cuda":
        return not is_old(device)
    return cpu_has_bfloat16()


def _check_memory(
    config: EngineConfig,
    folder: ModelFolder,
    gpu: GpuMemory | None,
    *,
    dtype: str,
    kernels: str,
    gpu_wait_s: float,
    block_share: float,
    draft: ModelFolder | None = None,
) -> int:
    """Raises ConfigError if these settings need more memory than is free on the machine or the
    GPU. Returns the bytes of a GPU's KV pool; 0 if the pool gets the memory that is left. On a GPU,
    the pool has `block_share` of each block, which is less than 1 if a rank has a part of the
    heads."""
    if gpu is None:
        _check_host(worker_need(config, folder, dtype=dtype, kernels=kernels, draft=draft))
        return 0
    # On a GPU, --kv-host-memory must fit into the free host memory, and everything else into the
    # memory of the GPU.
    copies_bytes = config.kv_host_bytes
    _check_host(Need(f"--kv-host-memory {copies_bytes}", copies_bytes, 0))
    need = worker_need(replace(config, kv_host_bytes=0), folder, dtype=dtype, kernels=kernels)
    pool_bytes = 0 if config.has_default_pool else need.pool_bytes
    if config.num_blocks is not None:
        pool_bytes = int(pool_bytes * block_share)
    gpu.begin(need.weights_bytes // config.tensor_parallel, pool_bytes, gpu_wait_s)
    return pool_bytes


def _check_host(need: Need) -> None:
    if too_much := why_too_much(need, 1, read_memory()):
        raise ConfigError(too_much)
