"""The default of --max-tokens-per-step on a device."""

import torch

from tandem.engine.cache.layout.kv_groups import STEP_TOKENS


def default_step_tokens(device: torch.device) -> int:
    """Returns the default for the largest number of tokens in a step.

    On CUDA, this is 16 tokens per multiprocessor, rounded down to a power of 2. For example, an
    H100 with 132 multiprocessors gets 2,048 tokens. A product with 4,096 columns then has 512 tiles
    of 128 x 128, about four for each multiprocessor.
    """
    if device.type != "cuda":
        return STEP_TOKENS
    wanted = 16 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(STEP_TOKENS, 1 << (int(wanted).bit_length() - 1))
