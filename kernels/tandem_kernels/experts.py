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


def choose_in_groups(
    logits: torch.Tensor,
    top_k: int,
    *,
    is_normalized: bool,
    groups: tuple[int, int] | None,
    scale: float,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns experts [T, top_k] of the groups that rank first, and their weights in fp32.

    Scores are a softmax of the logits [T, experts], and rank experts as they are; a group counts as
    much as its best. With a correction [experts] they are sigmoids, the correction is added to rank
    experts, and a group counts as much as its two best. Weights are scores times the scale.

    groups   how many there are, and how many of them a token chooses from; None: all of one
    """
    logits = logits.float()
    scores = torch.softmax(logits, dim=-1) if correction is None else torch.sigmoid(logits)
    ranks = scores if correction is None else scores + correction
    if groups is not None:
        num, top = groups
        of_groups = ranks.view(*ranks.shape[:-1], num, -1)
        best = of_groups.topk(1 if correction is None else 2, dim=-1).values.sum(-1)
        chosen = torch.topk(best, top, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        ranks = of_groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = torch.topk(ranks, top_k, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if is_normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return chosen, shares * scale
