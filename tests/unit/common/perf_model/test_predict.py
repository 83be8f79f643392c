from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.predict import (
    ASK_S,
    Expected,
    Holder,
    believed,
    beside_decode,
    expect,
    likely_rates,
    prefill_seconds,
    queue_seconds,
    token_seconds,
)
from tandem.common.perf_model.rates import (
    DecodeRate,
    PairRate,
    PrefillRate,
    WindowBytes,
    WorkerRates,
    default_pair,
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
    rates = WorkerRates(prefill, block_bytes=7, measured=True, windows=(WindowBytes(3, 5),))
    wire = msgspec.msgpack.encode((rates, pair))
    assert msgspec.msgpack.decode(wire, type=tuple[WorkerRates, PairRate]) == (rates, pair)


CORE = WorkerRates(PrefillRate(5e-3, 1e-3, 2e-7), block_bytes=16 * 23_040)
LAN, WAN = PairRate("nixl", 1e-3, 1e9), PairRate("grpc", 40e-3, 2e6)


def test_a_prefix_is_pulled_from_a_holder_when_that_is_faster() -> None:
    near = Holder(4000, LAN)
    far = Holder(4000, WAN)
    alone_s = prefill_seconds(CORE, 4100, 0)
    expected = expect(CORE, 4100, 0, holders=[far])
    assert expected == Expected(0.0, 0.0, alone_s, 0)
    expected = expect(CORE, 4100, 0, holders=[far, near])
    assert expected.start == 4000
    assert 0.09 < expected.pull_s < 0.1
    assert expected.compute_s == prefill_seconds(CORE, 4100, 4000)
    expected = expect(CORE, 4100, 4096, holders=[near])
    assert (expected.pull_s, expected.start) == (0.0, 4096)


def test_of_layers_with_a_window_only_the_end_of_a_prefix_moves() -> None:
    windows = (WindowBytes(33, 14 * 23_040),)
    some = WorkerRates(CORE.prefill, block_bytes=16 * 23_040, windows=windows)
    assert some.moved_bytes(20) == CORE.moved_bytes(20)
    assert some.moved_bytes(250) == (250 * 2 + 33 * 14) * 23_040
    slow = Holder(4000, PairRate("grpc", 0.0, 16e6))
    assert not expect(CORE, 4100, 0, holders=[slow]).pull_s
    assert expect(some, 4100, 0, holders=[slow]).pull_s == ASK_S + some.moved_bytes(250) / 16e6


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
        expected = expect(CORE, num_tokens, cached_tokens, holders=known)
        assert expected.compute_s == prefill_seconds(CORE, num_tokens, expected.start)
        return expected.total_s

    assert total(cached, holders) <= total(cached, holders[1:]) + 1e-9
    assert total(cached + more, holders) <= total(cached, holders) + 1e-9


def test_a_prompt_begins_when_the_queue_is_done_and_whatever_else_it_waits_for() -> None:
    queue_s = queue_seconds(CORE, 1000)
    own_s = prefill_seconds(CORE, 300, 0)
    assert queue_s == CORE.prefill.seconds(1000, 0, 512)
    assert expect(CORE, 300, 0, queue_s=queue_s).total_s == queue_s + own_s
    assert expect(CORE, 300, 0, queue_s=queue_s, after_s=0.5).total_s == queue_s + own_s
    assert expect(CORE, 300, 0, queue_s=queue_s, after_s=9.0).total_s == 9.0 + own_s


def test_beside_those_who_decode_chunks_are_smaller_and_each_step_is_longer() -> None:
    """The decode of four takes 4 ms of each step."""
    rates = beside_decode(CORE, 32, 4)
    assert rates.step_tokens == 32
    assert queue_seconds(rates, 320) == pytest.approx(CORE.prefill.seconds(320, 0, 32) + 10 * 4e-3)
    assert beside_decode(CORE, 0, 0) == beside_decode(CORE, 10_000, 0) == CORE


def test_who_has_measured_nothing_is_believed_to_be_like_the_one_in_the_middle() -> None:
    told = [
        WorkerRates(PrefillRate(0.0, token_s, 0.0), DecodeRate(0.0, 1 - token_s), measured=True)
        for token_s in (0.3, 0.1, 0.2, 0.4)
    ]
    likely = likely_rates([WorkerRates(), *told])
    assert likely == told[2]
    assert token_seconds(likely) == 0.2
    assert likely_rates(told, by=lambda rates: rates.decode.sequence_s) == told[0]
    new = WorkerRates(step_tokens=64, block_bytes=7)
    assert believed(new, likely) == WorkerRates(
        likely.prefill, step_tokens=64, block_bytes=7, measured=True
    )
    assert believed(told[0], likely) == told[0]
    assert believed(new, likely_rates([new])) == new
