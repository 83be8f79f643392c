"""Chooses experts for each token from the router's logits."""

import torch


def choose_experts(
    logits: torch.Tensor, top_k: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the `top_k` experts with the largest logits for each token. Returns the indices of
    the experts and their fp32 weights, both [T, top_k]. `logits` is [T, experts].

    The weights are the softmax over all experts. If `is_normalized`, they are the softmax over only
    the chosen experts.
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
    has_sigmoids: bool,
    has_roots: bool = False,
    correction: torch.Tensor | None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts as DeepSeek models do: first the best groups of experts, and then the `top_k`
    best experts in these groups. Returns the indices of the experts and their fp32 weights, both
    [T, top_k].

        score of an expert    softmax of the logits; with `has_sigmoids` sigmoid of its logit;
                              with `has_roots` the square root of softplus of its logit

                              without correction          with correction [experts]
        rank of an expert     score                       score + correction
        rank of a group       rank of its best expert     sum of the ranks of its two best experts

    The weight of a chosen expert is score * scale. With `is_normalized`, the scores are first
    divided by the sum of the chosen experts' scores.

    logits   [T, experts]
    groups   (number of groups, number of groups chosen per token); None: no groups
    chosen   [T, top_k], experts that are chosen whatever their scores are; None: the best
    """
    logits = logits.float()
    if has_roots:
        scores = torch.nn.functional.softplus(logits).sqrt()
    else:
        scores = torch.sigmoid(logits) if has_sigmoids else torch.softmax(logits, dim=-1)
    if chosen is None:
        chosen = _best(scores, top_k, groups, correction)
    shares = scores.gather(-1, chosen)
    if is_normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return chosen, shares * scale


def _best(
    scores: torch.Tensor,
    top_k: int,
    groups: tuple[int, int] | None,
    correction: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the experts with the highest ranks, [T, top_k]."""
    ranks = scores if correction is None else scores + correction
    if groups is not None:
        num, top = groups
        by_group = ranks.view(*ranks.shape[:-1], num, -1)
        best = by_group.topk(1 if correction is None else 2, dim=-1).values.sum(-1)
        chosen = torch.topk(best, top, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        ranks = by_group.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
    return torch.topk(ranks, top_k, dim=-1).indices
