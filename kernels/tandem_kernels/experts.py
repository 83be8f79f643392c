"""Chooses experts for each token from the router's logits."""

import torch


def choose_experts(
    logits: torch.Tensor, top_k: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of the chosen experts [T, top_k] for logits [T, experts], and their fp32
    weights.

    The weights are a softmax over all experts, or, if `is_normalized`, over the chosen ones.
    """
    logits = logits.float()
    highest, chosen = torch.topk(logits, top_k, dim=-1)
    if is_normalized:
        return chosen, torch.softmax(highest, dim=-1)
    return chosen, torch.softmax(logits, dim=-1).gather(-1, chosen)


def choose_in_groups(
    logits: torch.Tensor,
    top_k: int,
    *,
    is_normalized: bool,
    groups: tuple[int, int] | None,
    scale: float,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of experts [T, top_k] chosen from the best groups, and their fp32 weights
    (DeepSeek).

    Without a correction, scores are the softmax of the logits [T, experts]. Experts are ranked by
    score, and groups by the score of their best expert. With a correction [experts], scores are the
    sigmoid of the logits. Experts are ranked by score + correction, and groups by the sum of this
    value for their two best experts. The weights are scores * scale. With `is_normalized`, the
    scores are first divided by their sum.

    groups   number of groups, and number of groups chosen per token; None: no groups
    """
    logits = logits.float()
    scores = torch.softmax(logits, dim=-1) if correction is None else torch.sigmoid(logits)
    ranks = scores if correction is None else scores + correction
    if groups is not None:
        num, top = groups
        by_group = ranks.view(*ranks.shape[:-1], num, -1)
        best = by_group.topk(1 if correction is None else 2, dim=-1).values.sum(-1)
        chosen = torch.topk(best, top, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        ranks = by_group.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = torch.topk(ranks, top_k, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if is_normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return chosen, shares * scale
