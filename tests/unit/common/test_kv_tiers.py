"""Every place that names each tier has a name for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineOptions
from tandem.common.kv_tiers import KV_TIERS, KvTier
from tandem.engine.tiers.make_tiers import STORAGES
from tandem.errors import ConfigError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSpareFolder(EngineOptions):
    kv_spare_path: str = ""


@pytest.mark.parametrize(
    ("disk", "spare"),
    [
        ("/kv", "/kv"),
        ("/kv", "/kv/other/../"),
        ("~/kv", str(Path.home() / "kv")),
        ("/kv", "/kv/0"),
        ("/kv/0", "/kv"),
    ],
)
def test_two_tiers_cannot_have_one_folder(
    disk: str, spare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tier takes the first free folder below its path, so the tiers could swap folders."""
    tiers = (*KV_TIERS, KvTier("spare", "kv_spare_path", bytes_per_s=1e9, is_folder=True))
    monkeypatch.setattr("tandem.common.config.engine.KV_TIERS", tiers)
    both = WithSpareFolder(kv_disk_path="/kv", kv_spare_path="/kv-2")
    assert both.tier_folders == {"kv_disk_path": Path("/kv"), "kv_spare_path": Path("/kv-2")}
    with pytest.raises(ConfigError, match=r"kv-disk-path is .*kv.* and kv-spare-path is .*kv"):
        replace(both, kv_disk_path=disk, kv_spare_path=spare)


def test_the_folder_of_a_tier_may_begin_with_the_home_folder() -> None:
    assert not EngineOptions().tier_folders
    assert EngineOptions(kv_disk_path="~/kv").tier_folders == {"kv_disk_path": Path.home() / "kv"}
    with pytest.raises(
        ConfigError, match="kv-disk-path is ~nobody-has-this-name/kv; the path must not begin"
    ):
        EngineOptions(kv_disk_path="~nobody-has-this-name/kv")
