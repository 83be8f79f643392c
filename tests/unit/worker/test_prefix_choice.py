from tandem.common.perf_model.rates import PairRate, PrefillRate, WorkerRates
from tandem.worker.prefill.prefix_choice import ConnectedHolder, holders_worth_using

BLOCK = 16
RATES = WorkerRates(
    prefill=PrefillRate(step_s=0.01, token_s=0.001, token_context_s=0.0), block_bytes=1 << 20
)


def holder(
    name: str, num_blocks: int, *, bytes_per_s: float = 1e9, latency_s: float = 0
) -> ConnectedHolder:
    rate = PairRate("nixl", latency_s, bytes_per_s)
    return ConnectedHolder(num_blocks * BLOCK, rate, worker_id=name, epoch="e", address="x")


def chosen(*holders: ConnectedHolder, num_cached_blocks: int = 0) -> list[str]:
    found = holders_worth_using(
        holders,
        rates=RATES,
        block_size=BLOCK,
        num_tokens=1000,
        num_cached_blocks=num_cached_blocks,
    )
    return [each.worker_id for each in found]


def test_the_deepest_comes_first_at_the_same_rate() -> None:
    assert chosen(holder("a", 10), holder("b", 60), holder("c", 30)) == ["b", "c", "a"]


def test_a_slow_pair_loses_to_computing() -> None:
    # A block takes 16 ms to compute; at 50 MB/s it takes 21 ms to come.
    assert chosen(holder("slow", 60, bytes_per_s=50e6), holder("fast", 5)) == ["fast"]
    assert chosen(holder("far", 5, latency_s=0.2), holder("far too", 60, latency_s=0.2)) == [
        "far too"
    ]


def test_what_is_cached_is_asked_of_nobody() -> None:
    assert chosen(holder("a", 10), holder("b", 11), num_cached_blocks=10) == ["b"]
    assert chosen(holder("a", 10), num_cached_blocks=10) == []
