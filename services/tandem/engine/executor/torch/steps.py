"""Computes steps with torch's own operators, on any device, in any dtype, and with fast or
invariant numerics."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem.engine.executor.collectives import ALONE, Collectives
from tandem.engine.executor.torch.compressed_decoder import CompressedDecoder
from tandem.engine.executor.torch.decoder import Decoder
from tandem.engine.executor.torch.inputs import StepInputs, make_step_inputs
from tandem.engine.executor.torch.lora import StepLora
from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.executor.weights.lora import LoraWeights
from tandem.engine.scheduler.batch import StepBatch
from tandem.models.config.model import ModelConfig
from tandem_kernels.dispatch import Kernels, kernels_for
from tandem_kernels.logprobs import logprobs
from tandem_kernels.sampling import Draw, sample
from tandem_kernels.state_pool import Pool


class StepDecoder(Protocol):
    """A model's layers. `Decoder` documents the members."""

    final_hidden: torch.Tensor

    def forward(
        self,
        inputs: StepInputs,
        pools: Sequence[Pool],
        lora: StepLora,
        on_kv_written: Callable[[], object] | None = None,
    ) -> torch.Tensor: ...


class DecoderSteps:
    """Computes the steps of a decoder whose tensors torch computes."""

    def __init__(self, decoder: StepDecoder, kernels: Kernels) -> None:
        self._kernels = kernels
        self._decoder = decoder
        self._adapters: dict[str, LoraWeights] = {}

    def add_adapter(self, weights: LoraWeights) -> None:
        """Makes an adapter available to later steps. A step names an adapter by the adapter's
        digest."""
        self._adapters[weights.digest] = weights

    def drop_adapter(self, digest: str) -> None:
        """Removes an adapter that no later step uses."""
        self._adapters.pop(digest, None)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None
    ) -> list[int]:
        """Samples tokens as `Runner.sample` does."""
        return sample(logits if rows is None else logits[rows], draws)

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
        """Computes a step on the device of the pools. The arguments and the result are those of
        `NativeDecoder.forward`."""
        inputs = make_step_inputs(batch, pools, row_multiple=self._kernels.row_multiple)
        kernels = self._kernels
        lora = StepLora(
            inputs.adapted,
            self._adapters,
            kernels.linear,
            kernels.row_multiple,
            kernels.linear_of_heads,
        )
        if on_kv_written is None or pools[0].memory.device.type != "cuda":
            logits = self._decoder.forward(inputs, pools, lora, on_kv_written)
            for shares in inputs.shares:
                shares.finish()
            return logits
        # The event marks the point in the CUDA stream at which the KV is written. The host waits
        # for the event only after it has launched the step's remaining kernels, so that the device
        # does not become idle.
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        logits = self._decoder.forward(inputs, pools, lora, written.record)
        written.synchronize()
        on_kv_written()
        for shares in inputs.shares:
            shares.finish()
        return logits


class TorchSteps(DecoderSteps):
    """Computes the steps of Tandem's own decoder."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        numerics: str,
        ranks: Collectives = ALONE,
    ) -> None:
        """`weights` is the share of one of `ranks`. All ranks compute the same steps."""
        kernels = kernels_for(weights.device.type, numerics)
        kind = Decoder if config.shared_kv is None else CompressedDecoder
        super().__init__(kind(config, weights, kernels, ranks), kernels)
