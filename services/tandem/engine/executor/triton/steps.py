"""Computes steps with the Triton kernels. For a step of few tokens, the host normally replays a
recorded CUDA graph. For other steps, the host launches each kernel."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from triton import knobs

from tandem.engine.executor.collectives import ALONE, Collectives
from tandem.engine.executor.sharded_logits import whole_logits
from tandem.engine.executor.torch.lora import NO_LORA
from tandem.engine.executor.triton.decode_graphs import DecodeGraphs
from tandem.engine.executor.triton.decoder import TritonDecoder
from tandem.engine.executor.triton.graph import Recording
from tandem.engine.executor.triton.inputs import (
    DecodeRows,
    RowsInOrder,
    StepViews,
    adapted_rows,
    write_step,
)
from tandem.engine.executor.triton.lora import TritonAdapters
from tandem.engine.executor.triton.mixed_graphs import CHUNKS_MAX, MixedGraphs
from tandem.engine.executor.triton.tuning_shapes import repeated_blocks, tuned_chunks
from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.executor.weights.lora import LoraWeights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem.models.files import writing
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.sampling import Draw
from tandem_kernels.state_pool import Pool, StatePool
from tandem_kernels.triton.logprobs import logprobs
from tandem_kernels.triton.sampling import launch, take_drawn


class DeviceTokens(NamedTuple):
    """The tokens of a sampling that the device may still compute."""

    on_host: torch.Tensor  # int64 [n], valid after `copied` and until the next sampling
    copied: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """Waits until the tokens are on the host, and returns their ids."""
        if self.copied is not None:
            self.copied.synchronize()
        token_ids: list[int] = self.on_host.tolist()
        return token_ids


_STRIDE = 7919  # from a token of a tuned step to the next; it is prime


class TritonSteps:
    """Computes steps with the Triton kernels. One thread at a time may call `forward`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        max_num_seqs: int,
        max_model_len: int,
        step_tokens: int,
        num_adapters_max: int = 0,
        lora_rank_max: int = 0,
        records_adapters: bool = False,
        ranks: Collectives = ALONE,
    ) -> None:
        """`step_tokens` is the largest number of tokens of a step; steps of this size are tuned.
        `records_adapters`: CUDA graphs are recorded for steps with LoRA adapters too.
        `weights` is the share of one of `ranks`. All ranks compute the same steps."""
        self._decoder = TritonDecoder(config, weights, max_model_len, ranks)
        self._ranks = ranks
        # In the interpreter, graphs record nothing.
        self._has_graphs = ranks.is_recordable or weights.device.type == "cpu"
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._step_tokens = step_tokens
        self._vocab_size = config.vocab_size
        self._pools: Sequence[Pool] | None = None
        device = weights.device
        self._adapters = TritonAdapters(
            device,
            num_layers=config.num_layers,
            num_max=num_adapters_max,
            rank_max=lora_rank_max,
        )
        self._num_adapters_max = num_adapters_max
        # The products of latent attention that have one matrix for each head are launched one
        # adapter after the other.
        self._records_adapters = records_adapters and config.latent is None
        is_cuda = device.type == "cuda"
        # The tokens of the last sampling. A step that is launched ahead takes its tokens from here.
        self._drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._drawn_on_host = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=is_cuda)

    def add_adapter(self, weights: LoraWeights) -> None:
        """Makes an adapter available to later steps. A step names an adapter by the adapter's
        digest."""
        self._adapters.add(weights)

    def drop_adapter(self, digest: str) -> None:
        """Removes an adapter that no later step uses."""
        self._adapters.drop(digest)

    @torch.inference_mode()
    def prepare(self, pools: Sequence[Pool]) -> None:
        """Compiles and tunes the kernels and records the CUDA graphs for steps over these pools, so
        that no request has to wait for these tasks. No other worker may do this on the same card at
        the same time: both would measure each other's load and choose slow tile sizes. The runner
        calls this while it holds the lock of GpuMemory.

        `pools` has one pool for each KV group. The pools contain only zeros before and after the
        call. Raises ConfigError if Triton's cache folder cannot be written.
        """
        kv_pools = [pool for pool in pools if isinstance(pool, KvPool)]
        block_size = kv_pools[0].block_size
        device = kv_pools[0].device
        if device.type == "cuda":
            check_cache_folder()
        num_blocks = min(pool.layout.num_blocks for pool in kv_pools)
        self._pools = pools
        # Before the graphs: products are tuned once for each size of tiles, and the tokens of a
        # graph are all the same, which choose few experts.
        if device.type == "cuda":
            self._tune_chunks(pools, num_blocks)
        if self._has_graphs:
            own_vocab = len(self._ranks.share.of(self._vocab_size))
            logits = self._max_num_seqs + CHUNKS_MAX, own_vocab
            recording = Recording(
                lambda views, out: self._forward_ahead(views, pools, out),
                torch.empty(logits, dtype=torch.float32, device=device),
                torch.cuda.graph_pool_handle() if device.type == "cuda" else None,
            )
            self._mixed_graphs = MixedGraphs(
                recording,
                num_seqs_max=self._max_num_seqs,
                step_tokens=min(self._step_tokens, self._max_model_len),
                max_model_len=self._max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                num_groups=len(kv_pools),
                num_states=len(pools) - len(kv_pools),
                device=device,
                adapters=self._adapters.numbers if self._records_adapters else None,
                num_adapters=self._num_adapters_max,
            )
            self._graphs = DecodeGraphs(
                recording,
                num_seqs_max=self._max_num_seqs,
                max_model_len=self._max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                num_groups=len(kv_pools),
                num_states=len(pools) - len(kv_pools),
                device=device,
                rows=DecodeRows if self._ranks is ALONE else RowsInOrder,
            )

    def _tune_chunks(self, pools: Sequence[Pool], num_blocks: int) -> None:
        """Runs the steps of `tuned_chunks`, which tunes products and the kernels of prefill, and
        samples. The tokens are spread over the vocabulary, so that they choose various experts."""
        for chunk in tuned_chunks(self._step_tokens, self._max_model_len):
            blocks = repeated_blocks(chunk.context_len, _block_size(pools), num_blocks)
            others = [[0] if isinstance(pool, StatePool) else blocks for pool in pools[1:]]
            piece = SequenceSlice(
                [i * _STRIDE % self._vocab_size for i in range(chunk.num_tokens)],
                chunk.context_len,
                blocks,
                True,
                other_tables=others,
            )
            logits, _ = self._run_mixed(StepBatch([piece]), pools, wants_event=False)
        self.sample(logits, [Draw(1.0, 10, 0.9, 0.1, seed=0, position=0)])
        for pool in pools:
            pool.memory.zero_()

    def drop_graphs(self) -> None:
        """Frees the graphs and the pools of the last `prepare`."""
        self._pools = None
        if self._has_graphs:
            del self._graphs, self._mixed_graphs

    @torch.inference_mode()
    def start_sampling(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> DeviceTokens:
        """Samples tokens as `Runner.start_sampling` does."""
        if rows is not None:
            logits = logits[rows]
        size = len(draws)
        launch(logits, draws, out=self._drawn[:size])
        on_host = self._drawn_on_host[:size]
        on_host.copy_(self._drawn[:size], non_blocking=True)
        return DeviceTokens(on_host, _recorded_event(logits.device))

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Samples tokens as `start_sampling` does, and waits for them."""
        return self.start_sampling(logits, draws, rows).wait()

    logprobs = staticmethod(logprobs)

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns the same as `Runner.final_hidden`."""
        states: list[list[float]] = self._decoder.final_hidden[rows].float().tolist()
        return states

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        pools: Sequence[Pool],
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step. The arguments and the result are those of `TorchSteps.forward`. The
        logits of a step that replays a graph are valid until the next step.

        If `on_kv_written` is given, the host waits until the KV is written and then calls it.
        Otherwise the host does not wait for the device.
        """
        if self._pools is not pools:
            self.prepare(pools)
        device = pools[0].memory.device
        if batch.is_ahead:
            self._ranks.broadcast(self._drawn)  # only rank 0 has sampled
        if self._has_graphs and self._graphs.fits(batch.slices):
            logits = self._graphs.run(batch.slices)
            written = _recorded_event(device) if on_kv_written else None
            if not all(piece.num_logits for piece in batch.slices):
                wanted = [i for i, piece in enumerate(batch.slices) if piece.num_logits]
                logits = logits[wanted]
        elif self._has_graphs and self._mixed_graphs.fits(batch):
            logits = self._mixed_graphs.run(batch)
            written = _recorded_event(device) if on_kv_written else None
        else:
            logits, written = self._run_mixed(batch, pools, wants_event=on_kv_written is not None)
        if on_kv_written is not None:
            if written is not None:
                written.synchronize()
            on_kv_written()
        if self._ranks is ALONE:
            return logits
        return whole_logits(self._ranks, logits, self._vocab_size, batch.top_k)

    def _forward_ahead(
        self, views: StepViews, pools: Sequence[Pool], out: torch.Tensor
    ) -> torch.Tensor:
        take_drawn(views.token_ids, self._drawn)
        lora = self._adapters.of_any_step(views.tiles) if views.shape.num_tiles else NO_LORA
        return self._decoder.forward(views, pools, lora=lora, out=out)

    def _run_mixed(
        self, batch: StepBatch, pools: Sequence[Pool], *, wants_event: bool
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        num_states = sum(isinstance(pool, StatePool) for pool in pools)
        host = write_step(batch, _block_size(pools), num_states)
        array = host.array
        device = pools[0].memory.device
        if device.type == "cuda":
            array = array.pin_memory().to(device, non_blocking=True)
        written: list[torch.cuda.Event | None] = []
        views = StepViews.of(array, host.shape)
        if batch.is_ahead:
            take_drawn(views.token_ids, self._drawn)
        logits = self._decoder.forward(
            views,
            pools,
            lambda: written.append(_recorded_event(device) if wants_event else None),
            self._adapters.of_step(adapted_rows(batch)),
        )
        return logits, written[0]


def _block_size(pools: Sequence[Pool]) -> int:
    first = pools[0]
    assert isinstance(first, KvPool)  # state groups come last
    return first.block_size


def check_cache_folder() -> None:
    """Raises ConfigError if Triton cannot write to its cache folder."""
    folder = Path(knobs.cache.dir)
    with writing(folder, "TRITON_CACHE_DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _recorded_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
