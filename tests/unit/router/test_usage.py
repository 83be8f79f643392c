"""Tests of who may ask for whose usage, and of how many tenants the metrics name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from tandem.errors import BadRequest, Forbidden
from tandem.net.security import keys
from tandem.router.limits.metrics import OTHER, TENANTS_MAX, TenantMetrics
from tandem.router.limits.usage import UsageQuery


def test_a_users_key_sees_its_own_usage() -> None:
    user, operator = (keys.create("acme", role, now=0.0).record for role in ("user", "operator"))
    ask_for: Callable[..., UsageQuery] = partial(UsageQuery.of, "day", 1)
    assert ask_for(None, user).tenant == "acme"
    assert ask_for("acme", user).tenant == "acme"
    assert ask_for(None, operator).tenant is None
    assert ask_for("other", operator).tenant == "other"
    assert ask_for(None, None).tenant is None
    with pytest.raises(Forbidden):
        ask_for("other", user)


def test_metrics_name_some_tenants_only() -> None:
    metrics = TenantMetrics(CollectorRegistry())
    for number in range(3 * TENANTS_MAX):
        metrics.served(f"tenant-{number}", 1, 0, 1)
        metrics.refused(f"tenant-{number}", "tokens")
    (family,) = metrics.requests.collect()
    counts = {s.labels["tenant"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert len(counts) == TENANTS_MAX + 1
    assert counts[OTHER] == 2 * TENANTS_MAX


@pytest.mark.parametrize(
    ("window", "last", "word"), [("hour", 1, "day"), ("day", 0, "400"), ("minute", 361, "360")]
)
def test_what_redis_does_not_keep_is_refused(window: str, last: int, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        UsageQuery.of(window, last, None, None)
