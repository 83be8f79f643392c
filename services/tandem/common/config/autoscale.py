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
        help=(
            "on: pool sizes follow the load. dry-run: wanted sizes are only exported as metrics, "
            "for an HPA or KEDA."
        ),
    ),
]


@Parameter(name="*", group=AUTOSCALER, name_transform=_autoscale_name)
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig(Options):
    """Targets and bounds of the autoscaler, which `services/tandem/router/autoscaler` explains."""

    mode: AutoscaleMode = "off"
    prefill_min: Count = 1
    """Smallest number of prefill workers that the autoscaler keeps."""
    prefill_max: Count = 8
    """The autoscaler grows the prefill pool to at most this many workers."""
    decode_min: Count = 1
    """Smallest number of decode workers that the autoscaler keeps."""
    decode_max: Count = 8
    """The autoscaler grows the decode pool to at most this many workers."""
    ttft_s: PositiveSeconds = 2.0
    """Target of the autoscaler for the time to the first token, in seconds."""
    ttft_token_s: Seconds = 0.0
    """Seconds that each prompt token adds to --autoscale-ttft."""
    itl_s: PositiveSeconds = 0.1
    """Target of the autoscaler for the time between two tokens, in seconds."""
    cold_start_s: Seconds = 90.0
    """Time from the decision to start a worker until the first request of the worker, in seconds.
    The autoscaler plans with this estimate."""
    interval_s: PositiveSeconds = 10.0
    """Seconds between two decisions of the autoscaler."""
    idle_s: Seconds = 40.0
    """Pools shrink to their smallest size after this many seconds without a request. 0: off."""
    history_s: Constant[float] = 600.0  # forecasts use the loads of the last `history_s` seconds
    # The load is measured over periods of ten seconds, and pools are sized for this quantile of the
    # measurements. With 0.7, requests may have to queue in 30% of the periods.
    load_quantile: Constant[float] = 0.7
    # Fraction of the requests and tokens whose latency must be within the service levels.
    slo_quantile: Constant[float] = 0.95
    # Fraction of the time in which workers should be busy at the load for which pools are sized.
    utilization: Constant[float] = 0.9
    # Target for the used fraction of the decode workers' KV pools. With more use, the decode pool
    # grows.
    kv_use_max: Constant[float] = 0.85
    # A pool does not shrink below the largest size that it needed in the last `down_window_s`
    # seconds.
    down_window_s: Constant[float] = 600.0
    # Before a pool shrinks, the number of workers that the load needs is divided by this. Example:
    # a load needs 3.7 workers. With 1.0, a pool of 5 shrinks to 4. With 0.8, it stays at 5, because
    # 3.7 / 0.8 = 4.6. In a simulation, 0.8 gave fewer changes and service-level misses, but 6% more
    # worker-hours (docs/autoscaler.md).
    down_margin: Constant[float] = 1.0
    down_interval_s: Constant[float] = 60.0  # shortest time in seconds between two scale-downs
    # Largest fraction of a pool's workers that one scale-down removes. At least one is removed.
    step_down: Constant[float] = 0.25
    # Shortest time in seconds from one change of direction to the next. A change of direction is
    # growth after shrinking, or shrinking after growth.
    reversal_s: Constant[float] = 600.0

    def check_together(self) -> None:
        for pool in ("prefill", "decode"):
            least = getattr(self, f"{pool}_min")
            most = getattr(self, f"{pool}_max")
            if least > most:
                raise ConfigError(
                    f"autoscale-{pool}-min is {least}; it must be at most autoscale-{pool}-max, "
                    f"which is {most}"
                )
