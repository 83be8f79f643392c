"""The choice of experts for each token, from the logits of a router."""

import torch


def choose_experts(
    logits: torch.Tensor, top_k: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts [T, top_k] of logits [T, experts], and their weights in fp32.

    The weights are a softmax: over all experts, or over the chosen ones so that they sum to 1.
    """
    logits = logits.float()
    highest, chosen = torch.topk(logits, top_k, dim=-1)
    if is_normalized:
        return chosen, torch.softmax(highest, dim=-1)
    return chosen, torch.softmax(logits, dim=-1).gather(-1, chosen)
