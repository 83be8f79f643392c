"""The choice of experts: which, and with which weights."""

import torch

from tandem_kernels.experts import choose_experts

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
