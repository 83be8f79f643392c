"""The autoscaler in a running router: counted, decided, exported, and asked of the controller."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.router.scaling.autoscale import AutoscaleLoop
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"autoscale": AutoscaleConfig(mode="on", prefill_min=2, interval_s=0.1)}
BODY = {"prompt": "one two three", "max_tokens": 4}


@pytest_asyncio.fixture(loop_scope="module")
async def owned(router: RunningRouter) -> AsyncIterator[RunningRouter]:
    """Writes the sizes as a pool controller does."""
    view = router.router.view
    key = f"{{tandem:{view.cluster.cluster_id}}}:pools"
    await view.redis.set(key, json.dumps({"prefill": {"wanted": 0}, "decode": {"wanted": 2}}))
    await eventually(lambda: view.pools_json is not None and bool(view.decisions))
    yield router
    await view.redis.delete(key)


async def asked(router: RunningRouter) -> dict[str, int]:
    view = router.router.view
    value = await view.redis.brpop([f"{{tandem:{view.cluster.cluster_id}}}:scale"], timeout=5)
    assert value is not None, "nobody asked the controller"
    return json.loads(value[1])  # type: ignore[no-any-return]


async def test_it_asks_the_owner_of_the_sizes(owned: RunningRouter) -> None:
    assert await asked(owned) == {"prefill": 2}


async def test_a_decision_is_told_and_exported(owned: RunningRouter) -> None:
    state = (await owned.admin.get("/v1/cluster")).json()["autoscale"]
    assert state["mode"] == "on"
    assert [d["pool"] for d in state["decisions"]] == ["prefill", "decode"]
    assert state["decisions"][0]["why"].startswith("prefill 0 -> 2 because of bounds")
    metrics = (await owned.admin.get("/metrics")).text
    assert 'tandem_desired_workers{role="prefill"} 2.0' in metrics
    assert 'tandem_desired_workers{role="decode"} 2.0' in metrics


async def test_words_of_another_version_stop_neither_the_router_nor_the_autoscaler(
    owned: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    view = owned.router.view
    key = f"{{tandem:{view.cluster.cluster_id}}}:demand"
    await view.redis.hset(key, "another", b"no msgpack of ours")
    await eventually(lambda: "so the autoscaler ignores this report" in caplog.text)
    before = view.decisions
    await eventually(lambda: view.decisions is not before)
    assert (await owned.http.get("/health")).status_code == 200


async def test_a_bug_in_the_autoscaler_ends_no_router(
    owned: RunningRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(num_held: int, owned: dict[str, int]) -> list[object]:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(owned.router.first.autoscale, "_decide", broken)
        await eventually(lambda: "autoscaling failed" in caplog.text)
    before = owned.router.view.decisions
    await eventually(lambda: owned.router.view.decisions is not before)
    assert (await owned.http.get("/health")).status_code == 200


async def test_requests_count_as_demand_once_and_with_their_times(owned: RunningRouter) -> None:
    meter = owned.router._metrics.demand
    before = meter.demand()
    owned.script(saying([1, 2, 3, 4]))
    for _ in range(3):
        assert (await owned.http.post("/v1/completions", json=BODY)).status_code == 200
    came = meter.demand().since(before)

    assert (came.num_requests, came.num_ended, came.output_tokens) == (3, 3, 12)
    assert came.prefill_s > 0
    assert (sum(came.ttft), sum(came.itl)) == (3, 9)


async def test_one_of_several_routers_decides_for_the_demand_of_all(owned: RunningRouter) -> None:
    first = owned.router.first.autoscale
    config = replace(owned.router._config, router_id="router-1")
    view = owned.router.view
    meter = type(owned.router._metrics.demand)()
    second = AutoscaleLoop(config, view, meter, owned.router._trail, num_held=lambda: 0)
    await second._turn()  # it is seen, and does not decide
    assert second._policy is None
    before = first._total
    await asyncio.sleep(0.3)
    for _ in range(5):
        meter.new_request(0.5)
    await second._turn()
    await eventually(lambda: first._total.since(before).num_requests >= 5)

    assert first._total.since(before).prefill_s == pytest.approx(2.5, abs=0.1)
    assert view.decisions


async def test_without_an_owner_it_tells_and_stays_with_what_it_said(router: RunningRouter) -> None:
    """There is no prefill worker, and for now nobody who would start those that are desired."""
    view = router.router.view
    await eventually(lambda: view.pools_json is None and bool(view.decisions))
    key = f"{{tandem:{view.cluster.cluster_id}}}:scale"
    await view.redis.delete(key)
    for _ in range(3):
        before = view.decisions
        await eventually(lambda: view.decisions is not before)  # noqa: B023
    assert await view.redis.llen(key) == 0
    prefill, decode = view.decisions
    assert prefill.size == prefill.to >= 2
    assert (decode.size, decode.to) == (2, 2)


async def test_the_log_says_that_the_autoscaler_changed_a_size(
    owned: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    line = "change by autoscaler of router-0: sizes, before prefill=0, after prefill=2"
    await eventually(lambda: line in caplog.messages)
