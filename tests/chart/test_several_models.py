"""The chart with further models: each has the objects of its pools, and routers know all models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import _OF_MODEL, RouterConfig, RouterOptions
from tandem.common.options import extended, parse
from tests.harness.chart import component_of, find, render

HUB = {"source": "hub", "hub": {"name": "org/First"}}
MODELS: dict[str, Any] = {
    "model": HUB,
    "prefill": {"replicas": 2},
    "decode": {"options": {"kvMemory": 1 << 30}},
    "models": [
        {
            "name": "small",
            "servedName": "Small model",
            "hub": {"name": "org/Small", "revision": "abc"},
            "options": {"modelAliases": "gpt-*,x", "autoscaleDecodeMin": 0},
            "decode": {"replicas": 0, "sizeOwner": "other", "options": {"maxNumSeqs": 7}},
        },
        {"name": "big-one", "hub": {"name": "org/Big"}},
    ],
}
POOLS = {
    "prefill",
    "decode",
    *(f"{m}-{p}" for m in ("small", "big-one") for p in ("prefill", "decode")),
}


def args_of(found: dict[str, Any]) -> list[str]:
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def value(args: list[str], option: str) -> str:
    return args[args.index(option) + 1]


def test_each_model_has_the_objects_of_its_pools() -> None:
    objects = render(MODELS | {"networkPolicy": {"enabled": True}})
    for kind, others in (
        ("StatefulSet", {"redis"}),
        ("Service", {"router", "router-admin", "grpc", "grpc-admin", "redis"}),
        ("PodDisruptionBudget", {"router", "grpc"}),
        ("NetworkPolicy", {"router", "grpc", "redis"}),
    ):
        found = {component_of(each) for each in objects if each["kind"] == kind}
        assert found - others == POOLS, kind


def test_workers_have_the_model_and_the_group_of_their_pool() -> None:
    objects = render(MODELS)
    small = args_of(find(objects, "StatefulSet", "small-decode"))
    assert (value(small, "--role"), value(small, "--group")) == ("decode", "small")
    assert (value(small, "--model"), value(small, "--model-revision")) == ("org/Small", "abc")
    assert (value(small, "--max-num-seqs"), value(small, "--kv-memory")) == ("7", str(1 << 30))
    first = args_of(find(objects, "StatefulSet", "decode"))
    assert "--group" not in first
    assert (value(first, "--model"), value(first, "--max-num-seqs")) == ("org/First", "64")
    big = args_of(find(objects, "StatefulSet", "big-one-prefill"))
    assert (value(big, "--model"), value(big, "--group")) == ("org/Big", "big-one")
    assert find(objects, "StatefulSet", "big-one-prefill")["spec"]["replicas"] == 2
    assert find(objects, "StatefulSet", "small-decode")["spec"].get("replicas") is None


@pytest.mark.parametrize("component", ["router", "grpc"])
def test_routers_know_all_models(component: str) -> None:
    args = args_of(find(render(MODELS), "Deployment", component))
    words = [word.replace("$(POD_NAME)", "pod") for word in args]
    options = parse(RouterOptions, "tandem router", words)
    config = extended(options, RouterConfig, cluster=ClusterConfig("c", "redis://r", "t"))
    small, big = config.further()
    assert (small.model, small.group, small.model_revision) == ("org/Small", "small", "abc")
    assert (small.served_model_name, small.model_aliases) == ("Small model", ("gpt-*", "x"))
    assert small.autoscale.decode_min == 0
    assert (big.served_model_name, big.autoscale.decode_min) == ("big-one", 1)
    if component == "router":
        assert small.scale_objects == {
            "prefill": "statefulsets/demo-tandem-small-prefill",
            "decode": "statefulsets/demo-tandem-small-decode",
        }
        assert set(config.scale_objects) == {"prefill", "decode", "router"}


def test_a_path_is_one_in_the_claim() -> None:
    pvc = {"source": "pvc", "pvc": {"claimName": "models", "path": "first"}}
    values = {"model": pvc, "models": [{"name": "small", "path": "/a b/small"}]}
    objects = render(values)
    assert (
        value(args_of(find(objects, "StatefulSet", "small-decode")), "--model")
        == "/model/a b/small"
    )
    more = value(args_of(find(objects, "Deployment", "router")), "--more-models")
    config = RouterConfig(model="m", more_models=more, cluster=ClusterConfig("c", "redis://r", "t"))
    assert [each.model for each in config.further()] == ["/model/a b/small"]


def entry(**more: Any) -> dict[str, Any]:
    return {"model": HUB, "models": [{"name": "small", "hub": {"name": "o/S"}} | more]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (entry() | {"model": {"source": "builtin"}}, "model.source is builtin"),
        (entry(path="x"), "needs either hub or path|a path is one in the claim"),
        (entry(hub=None), "hub"),
        (entry() | {"gateway": {"enabled": True}}, "these know one model only"),
        (entry() | {"rayCluster": {"enabled": True}}, "these know one model only"),
        (
            entry() | {"decode": {"sizeOwner": "keda", "keda": {"prometheus": "http://p"}}},
            "the sizeOwner of decode is keda, whose query knows one model only",
        ),
        (
            entry(prefill={"sizeOwner": "keda", "keda": {"prometheus": "http://p"}}),
            "the sizeOwner of small-prefill is keda",
        ),
        (
            entry() | {"models": [{"name": "small", "hub": {"name": f"o/{n}"}} for n in "ab"]},
            "two entries have the name small",
        ),
        (entry(decode={"sizeOwner": "hpa", "hpa": {"metrics": []}}), "hpa.metrics is empty"),
        (entry(options={"autoscale": "on"}), "set sizeOwner to other"),
        (entry(options={"tokenizerProcesses": 2}), "tokenizerProcesses"),
        (entry(name="Small"), "name"),
        (entry(other=1), "other"),
    ],
)
def test_what_the_chart_does_not_have_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(values)


def test_a_name_that_is_too_long_for_a_stateful_set_is_refused() -> None:
    """Kubernetes adds 11 characters to it in a label of the pods, which may have 63."""
    name = "a" * 20
    longest = "r" * (52 - len(f"-{name}-prefill"))
    find(render(entry(name=name) | {"fullnameOverride": longest}), "StatefulSet", f"{name}-prefill")
    message = f"{longest}r-{name}-prefill would have a name of 53 characters"
    with pytest.raises(HelmError, match=message):
        render(entry(name=name) | {"fullnameOverride": longest + "r"})


@pytest.mark.parametrize("at", ["worker", "decode"])
def test_options_that_fit_one_model_only_are_not_those_of_a_further_model(at: str) -> None:
    values = yaml.safe_load((Path(__file__).parents[2] / "helm/tandem/values.yaml").read_text())
    defaults = values["worker"]["options"]
    options = {
        "lora": "a=/a",
        "maxModelLen": 100,
        "numBlocks": 200,
        "speculativeConfig": "auto",
        "kvEventsModel": "first",
        "maxNumSeqs": 9,
    }
    given = entry(decode={"options": {"maxModelLen": 300}}) | {at: {"options": options}}
    objects = render(given)
    first = args_of(find(objects, "StatefulSet", "decode"))
    small = args_of(find(objects, "StatefulSet", "small-decode"))
    expected = {**{name: defaults[name] for name in options}, "maxModelLen": 300, "maxNumSeqs": 9}
    for name, of_first in options.items():
        option = "--" + "".join(f"-{c.lower()}" if c.isupper() else c for c in name)
        assert value(first, option) == str(of_first)
        assert value(small, option) == str(expected[name])


@pytest.mark.parametrize("first_autoscales", [False, True])
def test_pools_that_do_not_autoscale_get_a_worker_for_the_time_of_an_upgrade(
    first_autoscales: bool,
) -> None:
    models = [
        {
            "name": "small",
            "hub": {"name": "o/S"},
            "decode": {"sizeOwner": "hpa", "hpa": {"metrics": [{"type": "Resource"}]}},
        },
        {
            "name": "big",
            "hub": {"name": "o/B"},
            "options": {"autoscale": "on"},
            "prefill": {"sizeOwner": "other"},
            "decode": {"sizeOwner": "other"},
        },
    ]
    values: dict[str, Any] = {"model": HUB, "models": models, "upgradeHook": {"surge": True}}
    expected = ["small-prefill"]
    if first_autoscales:
        values |= {"router": {"options": {"autoscale": "on"}}, "worker": {"sizeOwner": "other"}}
    else:
        expected = ["prefill", "decode", *expected]
    (job,) = (
        each
        for each in render(values)
        if each["kind"] == "Job" and each["metadata"]["name"] == "demo-tandem-surge"
    )
    assert args_of(job)[2:] == [f"statefulsets/demo-tandem-{pool}" for pool in expected]


def test_the_schema_has_the_options_of_a_model() -> None:
    schema = json.loads((Path(__file__).parents[2] / "helm/tandem/values.schema.json").read_text())
    names = schema["properties"]["models"]["items"]["properties"]["options"]["propertyNames"]
    own = {"group", "model-revision", "model-impl", "served-model-name", "scale-objects"}
    expected = {name.removeprefix("--") for name in _OF_MODEL} - own
    camel = {
        "".join(w.capitalize() if n else w for n, w in enumerate(e.split("-"))) for e in expected
    }
    assert set(names["enum"]) == camel
