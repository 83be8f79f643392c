"""Makes the steps of a model that the transformers library computes."""

import torch

from tandem.engine.executor.torch.steps import DecoderSteps
from tandem.engine.executor.transformers.check import check_attention, check_logits
from tandem.engine.executor.transformers.decoder import TransformersDecoder
from tandem.engine.executor.transformers.load import load_model
from tandem.engine.executor.weights.load import OnProgress
from tandem.models.config.model import ModelConfig
from tandem.models.folder import ModelFolder
from tandem_kernels.dispatch import kernels_for


def transformers_steps(
    folder: ModelFolder,
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
) -> DecoderSteps:
    """Loads a model, and checks it on small KV pools. Raises UnsupportedModel naming the model if
    it cannot be computed, and ConfigError if a file cannot be read."""
    model = load_model(folder, dtype=dtype, device=device, on_progress=on_progress)
    kernels = kernels_for(device.type, "fast")
    check_attention(model, config)
    steps = DecoderSteps(TransformersDecoder(model, config, kernels), kernels)
    check_logits(model, config, steps, block_size)
    return steps
