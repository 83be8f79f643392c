from __future__ import annotations

import torch
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tandem_kernels.norm import gated_rms_norm, rms_norm, rms_norm_of_gated


def test_equals_the_formula_in_float64() -> None:
    x = torch.randn(5, 48) * 3
    weight = torch.randn(48)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float(), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_normalized_in_float32() -> None:
    """4,096 equal values: a sum kept in bfloat16 would stop growing at 256 of them."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    result = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert result.dtype == torch.bfloat16
    assert bool((result == 1.0).all())


def test_a_rows_bits_do_not_depend_on_the_number_of_rows() -> None:
    x = torch.randn(64, 577)
    weight = torch.randn(577)
    together = rms_norm(x, weight, 1e-5)
    for first, last in ((0, 1), (3, 19), (16, 64)):
        assert torch.equal(rms_norm(x[first:last], weight, 1e-5), together[first:last])


def test_gated_norms_equal_those_of_transformers() -> None:
    x, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    after, before = Qwen3NextRMSNormGated(48, eps=1e-5), MambaRMSNormGated(48, 16, eps=1e-5)
    for module in (after, before):
        module.weight.data = weight
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5), after(x, gate))
    torch.testing.assert_close(rms_norm_of_gated(x, gate, weight, 1e-5, 16), before(x, gate))
