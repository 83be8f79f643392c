"""Every place that names each tier has a name for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineOptions
from tandem.common.kv_tiers import KV_TIERS, KvTier
from tandem.engine.tiers.make_tiers import STORAGES
from tandem.net.rpc.tandem.v1 import inference_pb2, worker_pb2

ROOT = Path(__file__).parents[3]
NAMES = [tier.name for tier in KV_TIERS]


def test_each_tier_can_be_made() -> None:
    assert list(STORAGES) == NAMES


@pytest.mark.parametrize("tier", KV_TIERS)
def test_each_tier_is_off_until_its_option_is_set(tier: KvTier) -> None:
    off = EngineOptions()
    assert not off.tiers
    value = type(getattr(off, tier.option))("1")
    assert replace(off, **{tier.option: value}).tiers == (tier.name,)


def test_usage_counts_the_tokens_of_each_tier() -> None:
    counts = {"device", *NAMES, "peer"}
    assert set(CachedTokens.__struct_fields__) == counts
    for message in (worker_pb2.CachedTokens, inference_pb2.CachedTokensByTier):
        assert set(message.DESCRIPTOR.fields_by_name) == counts, message.DESCRIPTOR.full_name


@pytest.mark.parametrize("name", NAMES)
def test_the_page_draws_each_tier(name: str) -> None:
    charts = (ROOT / "services/tandem/api/admin/page/charts.js").read_text()
    assert f"kv_{name}_share" in charts
    assert f"cached_{name}_per_s" in charts
