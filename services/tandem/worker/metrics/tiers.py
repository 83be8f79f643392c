"""Metrics of a worker's tiers and of pinned blocks, read from the engine's load at each scrape."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from tandem.engine.types import EngineLoad, TierLoad
from tandem.net.observability.metrics import gauges

_GAUGES: tuple[tuple[str, str, Callable[[TierLoad], int]], ...] = (
    ("blocks", "Blocks that the tier can hold", lambda tier: tier.blocks_total),
    ("blocks_held", "Blocks that the tier holds", lambda tier: tier.blocks_held),
)
_COUNTERS: tuple[tuple[str, str, Callable[[TierLoad], int]], ...] = (
    ("blocks_written", "Blocks written to the tier", lambda tier: tier.blocks_written),
    ("blocks_loaded", "Blocks loaded from the tier", lambda tier: tier.blocks_loaded),
    ("blocks_bad", "Blocks that the tier lost, or could not give back", lambda t: t.blocks_bad),
    ("write_failures", "Writes to the tier that failed", lambda tier: tier.write_failures),
)


DAMAGE_S = 600.0  # How long a damage stays visible to operators


class TierDamage:
    """Counts the blocks of each tier that could not be read lately.

    The object store is not counted, because the bucket's own rules delete blocks there. Blocks that
    a restart left out are not counted either.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_bad: dict[str, int] = {}  # tier -> bad blocks since the start
        # tier -> (recent bad blocks, time of the last one)
        self._lately: dict[str, tuple[int, float]] = {}

    def take(self, tiers: Iterable[TierLoad]) -> None:
        """Takes the tiers' state from a step report."""
        for tier in tiers:
            num_new = tier.blocks_bad - self._num_bad.get(tier.name, tier.blocks_bad)
            self._num_bad[tier.name] = tier.blocks_bad
            if num_new and tier.name != "store":
                self._lately[tier.name] = self.num_blocks(tier.name) + num_new, self._clock()

    def num_blocks(self, tier: str) -> int:
        """Returns the number of a tier's blocks that could not be read lately."""
        number, found_at = self._lately.get(tier, (0, 0.0))
        return number if self._clock() - found_at < DAMAGE_S else 0


def tier_metrics(labels: Mapping[str, str], load: EngineLoad) -> Iterator[Metric]:
    names = [*labels, "tier"]
    for name, text, value in _GAUGES:
        rows = [([*labels.values(), tier.name], value(tier)) for tier in load.tiers]
        yield gauges(f"tandem_kv_tier_{name}", text, names, rows)
    for name, text, value in _COUNTERS:
        family = CounterMetricFamily(f"tandem_kv_tier_{name}", text, labels=names)
        for tier in load.tiers:
            family.add_metric([*labels.values(), tier.name], value(tier))
        yield family
    text = "Cached blocks evicted without a copy in a tier, also if its policy does not copy them"
    dropped = CounterMetricFamily("tandem_kv_blocks_dropped", text, labels=list(labels))
    dropped.add_metric(list(labels.values()), load.blocks_dropped)
    yield dropped
    names = [*labels, "place"]
    rows = [([*labels.values(), pin.place], pin.blocks) for pin in load.pins]
    yield gauges("tandem_kv_pinned_blocks", "Blocks that are evicted last", names, rows)
    text = "Blocks by what became of their pins, and of the wishes for one"
    fates = CounterMetricFamily("tandem_kv_pins", text, labels=[*names, "fate"])
    for pin in load.pins:
        for fate, num_blocks in pin.fates.items():
            fates.add_metric([*labels.values(), pin.place, fate], num_blocks)
    yield fates
