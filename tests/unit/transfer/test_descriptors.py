from __future__ import annotations

import pytest

from tandem.transfer.descriptors import BlockPairs


def test_a_pair_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="2 source blocks for 1 local"):
        BlockPairs([1, 2], [1])
