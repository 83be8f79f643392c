"""Chooses experts for each token from the router's logits, in one launch. tandem_kernels/experts.py
has the rules: `choose_experts` without groups and correction, otherwise `choose_in_groups`.

Of experts with equal ranks, the one with the lower number is chosen.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import next_power_of_2

NUM_WARPS = 1


def choose_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    is_normalized: bool,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    has_sigmoids: bool = False,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers of the chosen experts, int32, and their weights, fp32, both [T, top_k].

    logits         [T, experts]
    is_normalized  the weights of a token are divided by their sum
    groups         (number of groups, number of groups chosen per token); None: no groups
    scale          factor of the weights
    has_sigmoids   the score of an expert is the sigmoid of its logit, not a softmax
    correction     fp32 [experts], which is added to the scores to rank experts; or None
    """
    num_tokens, num_experts = logits.shape
    num_groups, top_groups = groups or (1, 1)
    assert num_experts % num_groups == 0
    assert logits.stride(1) == 1
    assert correction is None or correction.is_contiguous()
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    _choose_experts[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        chosen,
        shares,
        scale,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts),
        TOP_K=top_k,
        CHOICES=next_power_of_2(top_k),
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        IS_NORMALIZED=is_normalized,
        HAS_SIGMOIDS=has_sigmoids,
        HAS_CORRECTION=correction is not None,
        num_warps=NUM_WARPS,
    )
    return chosen, shares


@triton.jit
def _choose_experts(
    logits,
    correction,
    chosen,
    shares,
    scale,
    stride_token,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_SIGMOIDS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BINS)
    is_expert = experts < NUM_EXPERTS
    least = float("-inf")
    x = tl.load(logits + token * stride_token + experts, mask=is_expert, other=least)
    x = x.to(tl.float32)
    if HAS_SIGMOIDS:
        scores = tl.sigmoid(x)
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    ranks = x
    if HAS_CORRECTION:
        ranks = scores + tl.load(correction + experts, mask=is_expert, other=0.0)
        ranks = tl.where(is_expert, ranks, least)
    if TOP_GROUPS < NUM_GROUPS:
        SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        group_of = experts // SIZE
        # Each expert gets the rank of its group.
        of_groups = tl.full((BINS,), least, tl.float32)
        for group in tl.static_range(NUM_GROUPS):
            members = tl.where(group_of == group, ranks, least)
            rank = tl.max(members, 0)
            if HAS_CORRECTION:
                best = tl.argmax(members, 0)
                rank += tl.max(tl.where(experts == best, least, members), 0)
            of_groups = tl.where(group_of == group, rank, of_groups)
        of_groups = tl.where(is_expert, of_groups, least)
        is_in = experts < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(of_groups, 0) // SIZE
            is_in |= group_of == best_group
            of_groups = tl.where(group_of == best_group, least, of_groups)
        ranks = tl.where(is_in, ranks, least)
    choices = tl.arange(0, CHOICES)
    of_choices = tl.zeros((CHOICES,), tl.float32)
    numbers = tl.zeros((CHOICES,), tl.int32)
    for choice in tl.static_range(TOP_K):
        # With logits that are NaN, any expert is chosen.
        best = tl.minimum(tl.argmax(ranks, 0), NUM_EXPERTS - 1)
        share = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        of_choices = tl.where(choices == choice, share, of_choices)
        numbers = tl.where(choices == choice, best, numbers)
        ranks = tl.where(experts == best, least, ranks)
    if IS_NORMALIZED:
        of_choices = of_choices / (tl.sum(of_choices, 0) + 1e-20)
    places = token * TOP_K + choices
    tl.store(chosen + places, numbers, mask=choices < TOP_K)
    tl.store(shares + places, of_choices * scale, mask=choices < TOP_K)
