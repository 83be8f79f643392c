from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.cost_model import (
    DecodeRate,
    Holder,
    PairRate,
    PrefillRate,
    WorkerRates,
    best_start,
    default_pair,
    prefill_seconds,
    token_contexts,
)

seconds = st.floats(0, 1)
prefills = st.builds(PrefillRate, seconds, seconds, seconds)
pairs = st.builds(PairRate, st.just("nixl"), seconds, st.floats(1, 1e12))
tokens = st.integers(0, 100_000)


def test_prefill_is_paid_by_step_by_token_and_by_what_lies_before_it() -> None:
    rate = PrefillRate(step_s=10.0, token_s=1.0, token_context_s=0.5)
    # Three steps; the tokens have 4, 5, 6, 7 and 8 others before them.
    assert rate.seconds(5, 4, 2) == 3 * 10.0 + 5 * 1.0 + 30 * 0.5
    assert rate.seconds(0, 4, 2) == 0.0


@given(st.integers(0, 200), st.integers(0, 200))
def test_token_contexts_are_the_sum_of_the_positions(num_tokens: int, context: int) -> None:
    assert token_contexts(num_tokens, context) == sum(range(context, context + num_tokens))


@given(prefills, tokens, tokens, st.integers(1, 4096), st.integers(0, 5000))
def test_prefill_never_gets_shorter(
    rate: PrefillRate, num_tokens: int, context: int, step_tokens: int, more: int
) -> None:
    base = rate.seconds(num_tokens, context, step_tokens)
    assert base >= 0
    assert rate.seconds(num_tokens + more, context, step_tokens) >= base
    assert rate.seconds(num_tokens, context + more, step_tokens) >= base
    assert rate.seconds(num_tokens, context, step_tokens + more) <= base


@given(pairs, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_pull_never_gets_shorter_with_more_bytes(
    rate: PairRate, num_bytes: int, more: int
) -> None:
    assert rate.latency_s <= rate.seconds(num_bytes) <= rate.seconds(num_bytes + more)


@given(st.builds(DecodeRate, seconds, seconds), st.integers(0, 500), st.integers(0, 500))
def test_a_decode_step_never_gets_shorter_with_more_sequences(
    rate: DecodeRate, num_sequences: int, more: int
) -> None:
    assert 0 <= rate.seconds(num_sequences) <= rate.seconds(num_sequences + more)


def test_an_unknown_transport_counts_as_the_slower_one() -> None:
    assert default_pair("carrier pigeon") == default_pair("grpc")
    assert default_pair("grpc").seconds(1 << 20) > default_pair("nixl").seconds(1 << 20)


@given(prefills, pairs)
def test_rates_survive_the_record(prefill: PrefillRate, pair: PairRate) -> None:
    rates = WorkerRates(prefill, block_bytes=7, measured=True)
    wire = msgspec.msgpack.encode((rates, pair))
    assert msgspec.msgpack.decode(wire, type=tuple[WorkerRates, PairRate]) == (rates, pair)


CORE = WorkerRates(PrefillRate(5e-3, 1e-3, 2e-7))
LAN, WAN = PairRate("nixl", 1e-3, 1e9), PairRate("grpc", 40e-3, 2e6)
TOKEN_BYTES = 23_040


def test_a_prefix_is_pulled_from_a_holder_when_that_is_faster() -> None:
    near, far = Holder(4000, LAN), Holder(4000, WAN)
    assert best_start(CORE, 4100, 0, [far], bytes_per_token=TOKEN_BYTES) == (0.0, 0)
    seconds, cached = best_start(CORE, 4100, 0, [far, near], bytes_per_token=TOKEN_BYTES)
    assert cached == 4000
    assert 0.09 < seconds < 0.1
    assert best_start(CORE, 4100, 4096, [near], bytes_per_token=TOKEN_BYTES) == (0.0, 4096)


@given(
    st.integers(1, 8000),
    st.integers(0, 8000),
    st.lists(st.builds(Holder, st.integers(0, 8000), pairs), max_size=3),
    st.integers(0, 500),
)
def test_more_cached_or_one_more_holder_never_makes_a_prompt_slower(
    num_tokens: int, cached: int, holders: list[Holder], more: int
) -> None:
    def total(cached_tokens: int, known: list[Holder]) -> float:
        wait, start = best_start(CORE, num_tokens, cached_tokens, known, bytes_per_token=100.0)
        return wait + prefill_seconds(CORE, num_tokens, start)

    assert total(cached, holders) <= total(cached, holders[1:]) + 1e-9
    assert total(cached + more, holders) <= total(cached, holders) + 1e-9
