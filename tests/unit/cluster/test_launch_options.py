from __future__ import annotations

import pytest

from tandem.cluster.launch.options import autoscale_options
from tandem.errors import ConfigError
from tests.harness.programs import parse_router


def test_a_router_is_told_the_autoscalers_mode_and_bounds() -> None:
    command = ["tandem", "router", "--model", "m", *autoscale_options("on", 3)]
    given = parse_router(command)

    assert (given.autoscale, given.autoscale_prefill_max, given.autoscale_decode_max) == (
        "on",
        3,
        3,
    )
    assert given.autoscale_cold_start == 15


def test_what_a_router_would_refuse_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="autoscale is 'maybe'"):
        autoscale_options("maybe", 3)
    with pytest.raises(ConfigError, match="autoscale-prefill-max is 0"):
        autoscale_options("on", 0)
