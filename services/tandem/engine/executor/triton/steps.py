"""Computes steps with the Triton kernels. For a step with one token per sequence, the host normally
replays a recorded CUDA graph. For other steps, the host launches each kernel."""

from collections.abc import Callable, Sequence

import torch

from tandem.engine.executor.triton.decode_graphs import DecodeGraphs
from tandem.engine.executor.triton.decoder import TritonDecoder
from tandem.engine.executor.triton.inputs import StepViews, adapted_rows, write_step
from tandem.engine.executor.triton.lora import TritonAdapters
from tandem.engine.executor.triton.tuning_lock import tuning_alone
from tandem.engine.executor.triton.tuning_shapes import repeated_blocks, tuned_chunks
from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.executor.weights.lora import LoraWeights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.models.config.model import ModelConfig
from tandem_kernels.kv_cache import KvPool
from tandem_kernels.sampling import Draw
from tandem_kernels.triton.logprobs import logprobs
from tandem_kernels.triton.sampling import sample

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
    ) -> None:
        """`step_tokens` is the largest number of tokens of a step; steps of this size are tuned."""
        self._decoder = TritonDecoder(config, weights, max_model_len)
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._step_tokens = step_tokens
        self._vocab_size = config.vocab_size
        self._pools: Sequence[KvPool] | None = None
        self._adapters = TritonAdapters(weights.embedding.device)

    def add_adapter(self, weights: LoraWeights) -> None:
        """Makes an adapter available to later steps. A step names an adapter by the adapter's
        digest."""
        self._adapters.add(weights)

    def drop_adapter(self, digest: str) -> None:
        """Removes an adapter that no later step uses."""
        self._adapters.drop(digest)

    @torch.inference_mode()
    def prepare(self, pools: Sequence[KvPool]) -> None:
        """Compiles and tunes the kernels and records the CUDA graphs for steps over these pools, so
        that no request has to wait for these tasks. Workers on one card do this one after the
        other.

        `pools` has one pool for each KV group. The pools contain only zeros before and after the
        call.
        """
        with tuning_alone(pools[0].device):
            self._prepare(pools)

    def _prepare(self, pools: Sequence[KvPool]) -> None:
        block_size = pools[0].block_size
        device = pools[0].device
        num_blocks = min(pool.layout.num_blocks for pool in pools)
        self._pools = pools
        # Before the graphs: products are tuned once for each size of tiles, and the tokens of a
        # graph are all the same, which choose few experts.
        if device.type == "cuda":
            self._tune_chunks(pools, num_blocks)
        self._graphs = DecodeGraphs(
            lambda views: self._decoder.forward(views, pools),
            num_seqs_max=self._max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            num_groups=len(pools),
            device=device,
        )

    def _tune_chunks(self, pools: Sequence[KvPool], num_blocks: int) -> None:
        """Runs the steps of `tuned_chunks`, which tunes products and the kernels of prefill, and
        samples. The tokens are spread over the vocabulary, so that they choose various experts."""
        for chunk in tuned_chunks(self._step_tokens, self._max_model_len):
            blocks = repeated_blocks(chunk.context_len, pools[0].block_size, num_blocks)
            others = [blocks] * (len(pools) - 1)
            piece = SequenceSlice(
                [i * _STRIDE % self._vocab_size for i in range(chunk.num_tokens)],
                chunk.context_len,
                blocks,
                True,
                other_tables=others,
            )
            logits, _ = self._run_mixed(StepBatch([piece]), pools, wants_event=False)
        sample(logits, [Draw(1.0, 10, 0.9, 0.1, seed=0, position=0)])
        for pool in pools:
            pool.memory.zero_()

    def drop_graphs(self) -> None:
        """Frees the graphs and the pools of the last `prepare`."""
        self._pools = None
        del self._graphs

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Samples tokens as `Runner.sample` does."""
        if rows is not None:
            logits = logits[rows]
        token_ids: list[int] = sample(logits, draws).tolist()
        return token_ids

    logprobs = staticmethod(logprobs)

    def final_hidden(self, rows: Sequence[int]) -> list[list[float]]:
        """Returns the same as `Runner.final_hidden`."""
        states: list[list[float]] = self._decoder.final_hidden[rows].float().tolist()
        return states

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        pools: Sequence[KvPool],
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Computes a step. The arguments and the result are those of `TorchSteps.forward`. The
        logits of a decode step are valid until the next decode step.

        If `on_kv_written` is given, the host waits until the KV is written and then calls it.
        Otherwise the host does not wait for the device.
        """
        if self._pools is not pools:
            self.prepare(pools)
        device = pools[0].device
        if self._graphs.fits(batch.slices):
            logits = self._graphs.run(batch.slices)
            written = _recorded_event(device) if on_kv_written else None
            if not all(piece.num_logits for piece in batch.slices):
                wanted = [i for i, piece in enumerate(batch.slices) if piece.num_logits]
                logits = logits[wanted]
        else:
            logits, written = self._run_mixed(batch, pools, wants_event=on_kv_written is not None)
        if on_kv_written is not None:
            if written is not None:
                written.synchronize()
            on_kv_written()
        return logits

    def _run_mixed(
        self, batch: StepBatch, pools: Sequence[KvPool], *, wants_event: bool
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        host = write_step(batch, pools[0].block_size)
        array = host.array
        device = pools[0].device
        if device.type == "cuda":
            array = array.pin_memory().to(device, non_blocking=True)
        written: list[torch.cuda.Event | None] = []
        logits = self._decoder.forward(
            StepViews.of(array, host.shape),
            pools,
            lambda: written.append(_recorded_event(device) if wants_event else None),
            self._adapters.of_step(adapted_rows(batch)),
        )
        return logits, written[0]


def _recorded_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
