"""KV budgets at the router: limits, and refusals."""

from __future__ import annotations

import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.common.kv_budget import KvBudget
from tandem.errors import BadRequest
from tandem.router.request.generator import pool_tokens_of
from tandem.router.request.request import ClientRequest

CLUSTER = ClusterConfig(cluster_id="c", redis_url="redis://x", token="t")
ALLOWS = RouterConfig(model="m", cluster=CLUSTER)
REFUSES = RouterConfig(model="m", cluster=CLUSTER, kv_budgets="refuse")


def test_a_budget_that_fits_a_pool_lifts_its_bound() -> None:
    plain = ClientRequest("x")
    fits = ClientRequest("x", kv_budget=KvBudget(50))
    assert pool_tokens_of(plain, 100, REFUSES) == 100
    assert pool_tokens_of(fits, 100, ALLOWS) is None
    assert pool_tokens_of(fits, None, ALLOWS) is None
    assert pool_tokens_of(ClientRequest("x", kv_budget=KvBudget(51)), 100, ALLOWS) == 100


def test_an_operator_may_refuse_budgets() -> None:
    with pytest.raises(BadRequest, match="--kv-budgets refuse") as raised:
        pool_tokens_of(ClientRequest("x", kv_budget=KvBudget(50)), None, REFUSES)
    assert raised.value.param == "kv_budget"
