"""Settings of the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from tandem.common.config.groups import AUTOSCALER
from tandem.common.options import Constant, Count, Options, PositiveSeconds, Seconds, option_name
from tandem.errors import ConfigError

Autoscale = Literal["off", "dry-run", "on"]


def _autoscale_name(field_name: str) -> str:
    return f"autoscale-{option_name(field_name)}"


AutoscaleMode = Annotated[
    Autoscale,
    Parameter(
        name="--autoscale",
        help="Pool sizes follow the load. dry-run: wanted sizes are exported, for an HPA or KEDA.",
    ),
]


@Parameter(name="*", group=AUTOSCALER, name_transform=_autoscale_name)
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig(Options):
    """Targets and bounds of the autoscaler, which `services/tandem/router/autoscaler` explains."""

    mode: AutoscaleMode = "off"
    prefill_min: Count = 1
    """Smallest number of prefill workers."""
    prefill_max: Count = 8
    """Largest number of prefill workers."""
    decode_min: Count = 1
    """Smallest number of decode workers."""
    decode_max: Count = 8
    """Largest number of decode workers."""
    ttft_s: PositiveSeconds = 2.0
    """Target for the time to the first token, in seconds."""
    ttft_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to the target for the first token."""
    itl_s: PositiveSeconds = 0.1
    """Target for the time between two tokens, in seconds."""
    cold_start_s: Seconds = 90.0
    """Seconds that a new worker needs until it takes its first request."""
    interval_s: PositiveSeconds = 10.0
    """Seconds between two decisions."""
    idle_s: Seconds = 40.0
    """Pools shrink to their smallest size after this many seconds without a request. 0: off."""
    history_s: Constant[float] = 600.0  # forecasts use the loads of this period
    # Pools are sized for this quantile of the loads, each measured over ten seconds. Requests may
    # queue in periods with a higher load.
    load_quantile: Constant[float] = 0.7
    # This quantile of the latencies must be within the service levels: with 0.95, 95% of them.
    slo_quantile: Constant[float] = 0.95
    # target share of time in which workers are busy at the load of `load_quantile`
    utilization: Constant[float] = 0.9
    kv_use_max: Constant[float] = 0.85  # largest allowed use of a decode worker's KV pool
    # A pool does not become smaller than its largest wanted size in the last `down_window_s`
    # seconds.
    down_window_s: Constant[float] = 600.0
    # A pool shrinks only if the load needs less than this share of the smaller pool's capacity.
    # With 0.8, pools shrink later: there are fewer changes and service-level misses for 6% more
    # worker-hours (docs/autoscaler.md).
    down_margin: Constant[float] = 1.0
    down_interval_s: Constant[float] = 60.0  # shortest time between two scale-downs
    # A pool shrinks by at most this share of its size at a time, or by one worker if that is more.
    step_down: Constant[float] = 0.25
    # shortest time between two changes of direction (growth, shrinking)
    reversal_s: Constant[float] = 600.0

    def check_together(self) -> None:
        for pool in ("prefill", "decode"):
            least = getattr(self, f"{pool}_min")
            most = getattr(self, f"{pool}_max")
            if least > most:
                raise ConfigError(
                    f"autoscale-{pool}-min is {least} and autoscale-{pool}-max is {most}; "
                    "0 <= min <= max is allowed"
                )
