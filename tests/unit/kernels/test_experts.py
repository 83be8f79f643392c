"""The choice of experts: which, and with which weights."""

import torch

from tandem_kernels.experts import choose_experts, choose_in_groups

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 5.0, 4.0]])


def test_weights_over_all_experts() -> None:
    chosen, shares = choose_experts(LOGITS, 2, is_normalized=False)
    assert chosen.tolist() == [[1, 2], [2, 3]]
    torch.testing.assert_close(shares, LOGITS.softmax(-1).gather(1, chosen))
    assert (shares.sum(1) < 1).all()


def test_weights_over_the_chosen_sum_to_one() -> None:
    chosen, shares = choose_experts(LOGITS.bfloat16(), 3, is_normalized=True)
    assert chosen[0].tolist() == [1, 2, 0]
    torch.testing.assert_close(shares.sum(1), torch.ones(2))
    torch.testing.assert_close(shares[0, 0] / shares[0, 1], torch.tensor(1.0).exp())


def test_a_group_counts_as_much_as_its_best_expert() -> None:
    """The second row's best two are of two groups, of which it may have one."""
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [4.0, 0.0, 5.0, 1.0]])
    chosen, shares = choose_in_groups(
        logits,
        2,
        is_normalized=False,
        groups=(2, 1),
        scale=3.0,
        has_sigmoids=False,
        correction=None,
    )
    assert chosen.tolist() == [[1, 0], [2, 3]]
    torch.testing.assert_close(shares, 3 * logits.softmax(-1).gather(1, chosen))


def test_a_correction_ranks_experts_and_weighs_none() -> None:
    """Its best expert is in the first group, and the two that together rank first in the second."""
    logits, correction = torch.tensor([[3.0, -3.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 0.5])
    settings = {"is_normalized": True, "scale": 2.0, "correction": correction}
    settings |= {"has_sigmoids": True}
    chosen, shares = choose_in_groups(logits, 2, groups=(2, 1), **settings)
    assert chosen.tolist() == [[3, 2]]
    scores = logits.sigmoid()[0, chosen[0]]
    torch.testing.assert_close(shares[0], 2 * scores / scores.sum())
    assert choose_in_groups(logits, 2, groups=None, **settings)[0].tolist() == [[3, 0]]


def test_a_correction_may_be_added_to_softmaxes() -> None:
    logits, correction = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.6])
    chosen, shares = choose_in_groups(
        logits,
        2,
        is_normalized=True,
        groups=None,
        scale=1.0,
        has_sigmoids=False,
        correction=correction,
    )
    assert chosen.tolist() == [[2, 0]]
    torch.testing.assert_close(shares[0], logits[0, [2, 0]].softmax(-1))
