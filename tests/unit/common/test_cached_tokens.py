"""Counts of cached tokens by tier keep their sum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.common.cached_tokens import CachedTokens

COUNTS = st.builds(CachedTokens, *[st.integers(0, 100)] * len(CachedTokens.__struct_fields__))


@given(COUNTS, st.integers(0, 500))
def test_the_first_tokens_are_cut_from_the_end(cached: CachedTokens, num_tokens: int) -> None:
    cut = cached.first(num_tokens)
    assert cut.total == min(num_tokens, cached.total)
    rest = cached - cut
    assert min(rest.device, rest.host, rest.disk, rest.peer) >= 0
    if rest.device:
        assert cut == CachedTokens(device=num_tokens)


@given(COUNTS, COUNTS)
def test_what_follows_adds_only_the_tokens_after(one: CachedTokens, other: CachedTokens) -> None:
    both = one.then(other)
    assert both.total == max(one.total, other.total)
    added = both - one
    assert min(added.device, added.host, added.disk, added.peer) >= 0
    assert one.then(one) == one


def test_a_prompt_of_which_a_peer_had_more() -> None:
    here = CachedTokens(device=32, host=16)
    there = CachedTokens(device=16, disk=64, peer=16)
    assert here.then(there) == CachedTokens(device=32, host=16, disk=32, peer=16)
