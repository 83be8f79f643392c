"""What tuning has chosen."""

from __future__ import annotations

import pytest
import triton

from tandem_kernels.triton.decode_attention import _attend_split
from tandem_kernels.triton.tuning import choices


def test_choices_by_kernel_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = triton.Config({"KEYS": 64}, num_warps=4, num_stages=3)
    monkeypatch.setattr(_attend_split, "cache", {(4, 128, "card"): config})
    found = choices()
    assert found["_attend_split"] == {"(4, 128, 'card')": str(config)}
    assert "_attend_latent_chunks" in found
