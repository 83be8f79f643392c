"""Makes the KV tiers (host memory, disk, object store) of all simulated workers. The workers share
one object store."""

from collections.abc import Sequence

from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.tiers import WorkerTiers


def make_tiers(scenario: Scenario, arrivals: Sequence[Arrival]) -> dict[str, WorkerTiers]:
    """Returns a dict: worker id -> tiers of the worker. To save memory, a tier has at most as many
    slots as the trace has different blocks."""
    num_blocks = len({(a.salt, block_id) for a in arrivals for block_id in a.block_ids})
    in_store = set[bytes]()
    return {
        worker_id: WorkerTiers(
            scenario.true_rates(worker_id).tiers,
            [min(count, max(1, num_blocks)) for count in scenario.tier_blocks],
            policy=scenario.tier_policy,
            prefill=scenario.true_rates(worker_id).prefill,
            block_size=scenario.block_size,
            in_store=in_store,
        )
        for worker_id in scenario.roles
    }
