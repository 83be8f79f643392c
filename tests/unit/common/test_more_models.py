"""The entries of several models, from the command line to the settings of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cluster.launch.options import FurtherModel, LaunchOptions, make_spec
from tandem.cluster.pools import plan
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.cluster import ClusterConfig, group_of, pool_name, role_of
from tandem.common.config.more_models import (
    as_words,
    group_name,
    join_models,
    split_models,
    with_all_models,
)
from tandem.common.config.router import RouterConfig, RouterOptions
from tandem.common.options import extended, parse, to_argv
from tandem.errors import ConfigError
from tandem.models.source import resolve
from tandem.router.workers.pools import decode_pools, pools_of_group

CLUSTER = ClusterConfig("c", "redis://r", "t")


def launch(*argv: str) -> LaunchOptions:
    return parse(LaunchOptions, "tandem up", with_all_models(argv))


def router(more: str, **settings: object) -> RouterConfig:
    options = RouterOptions(model="first", more_models=more, **settings)  # type: ignore[arg-type]
    return extended(options, RouterConfig, cluster=CLUSTER)


def test_entries_are_written_and_read() -> None:
    entries = [["a b/c", "decode=2"], ["d;e", "served-model-name=x y"], ["f"]]
    assert split_models(join_models(entries)) == entries
    assert split_models("a decode=2; b;; 'c d' x=1 ;") == [["a", "decode=2"], ["b"], ["c d", "x=1"]]
    assert split_models("a#1 b=c#d") == [["a#1", "b=c#d"]]
    assert split_models("") == []
    assert as_words(["--a", "1", "--flag", "--b", "x y"]) == ["a=1", "flag", "b=x y"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model", "a"], ["--model", "a"]),
        (["--decode", "2", "--model=a"], ["--decode", "2", "--model=a"]),
        (["--model", "a", "--model", "b"], ["--model", "a", "--more-models", "b"]),
        (
            ["--model=a", "--port", "1", "--model", "b decode=2", "--more-models", "c"],
            ["--model", "a", "--more-models", "b decode=2; c", "--port", "1"],
        ),
    ],
)
def test_further_models_of_the_command_line(argv: list[str], expected: list[str]) -> None:
    assert with_all_models(argv) == expected


def test_a_launch_gives_each_model_its_own_and_the_common_options() -> None:
    options = launch(
        *("--model", "a", "--served-model-name", "first", "--lora", "x=/x", "--kv-memory", "2GiB"),
        *(
            "--decode",
            "3",
            "--model",
            "org/B.1 decode=0 autoscale=on autoscale-min=0",
            "--port",
            "9",
        ),
    )
    (second,) = options.further()
    assert (options.model, second.model, second.group) == ("a", "org/B.1", "b.1")
    assert (options.num_decode, second.num_decode) == (3, 0)
    assert (options.autoscale, second.autoscale, second.autoscale_min) == ("off", "on", 0)
    assert (options.engine.kv_bytes_max, second.engine.kv_bytes_max) == (2 << 30, 2 << 30)
    assert (second.served_model_name, second.engine.lora, second.more_models) == ("", {}, "")
    assert options.num_workers == 5  # 1 prefill and 3 decode workers, and 1 prefill worker
    assert parse(LaunchOptions, "tandem up", to_argv(options)) == options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "a", "--model", "b port=1"], "b has the option 'port'"),
        (["--model", "a", "--model", "b decode=x"], "more-models: b: "),
        (["--model", "a", "--model", "b decode=65"], "decode is 65; it must be at most 64"),
        (["--model", "a", "--model", "b", "--model", "c/b"], "would have the name 'b'"),
        (["--model", "a/m", "--model", "b/m"], "would have the name 'm'"),
        (
            ["--model", "a", "--served-model-name", "x", "--model", "b served-model-name=x"],
            "would have the name 'x'",
        ),
        (["--model", "a", "--model", "..."], "would have the name ''"),
        (["--model", "a", "--model", "'b"], "more-models cannot be read"),
        (["--model", "a", "--model", "b", "--listen", "10.0.0.1"], "--listen and several models"),
    ],
)
def test_wrong_entries_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        launch(*argv)


def test_a_router_has_settings_of_each_model() -> None:
    config = router(
        "/b group=b served-model-name=B model-aliases=x,y-* tool-parser=json; /c group=c",
        served_model_name="A",
        model_aliases=("z",),
        hold_deadline_s=5.0,
        answers=AnswerConfig(tool_parser="hermes"),
        http_port=7,
    )
    second, third = config.further()
    assert (second.model, second.group, second.served_model_name) == ("/b", "b", "B")
    assert (second.model_aliases, second.answers.tool_parser) == (("x", "y-*"), "json")
    assert (third.model_aliases, third.answers, third.served_model_name) == ((), AnswerConfig(), "")
    assert (second.hold_deadline_s, third.hold_deadline_s) == (5.0, 5.0)
    assert (third.http_port, third.cluster, third.further()) == (7, CLUSTER, [])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("/b", "would have the name ''"),
        ("/b group=b; /c group=b", "would have the name 'b'"),
        ("/b group=b http-port=1", "has the option 'http-port'"),
        ("/b group=b/c", "group is 'b/c'"),
    ],
)
def test_wrong_models_of_a_router_are_refused(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        router(more).further()


def test_a_further_model_may_have_the_defaults_where_the_first_one_has_not() -> None:
    options = launch("--model", "a", "--kv-budgets", "refuse", "--model", "b kv-budgets=allow; c")
    folder = resolve("smollm2")
    entries = [FurtherModel(each, folder, each.model).entry for each in options.further()]
    config = router(join_models(entries), kv_budgets="refuse")
    assert [each.kv_budgets for each in config.further()] == ["allow", "refuse"]


def test_a_group_is_not_that_of_the_first_model() -> None:
    with pytest.raises(ConfigError, match="would have the name 'b'"):
        router("/b group=b", group="b").further()


def test_a_switch_that_is_on_for_all_is_off_for_one_model() -> None:
    common = ("--model", "a", "--tensor-parallel", "2", "--expert-parallel")
    options = launch(*common, "--model", "b no-expert-parallel")
    (second,) = options.further()
    assert (options.engine.expert_parallel, second.engine.expert_parallel) == (True, False)


def test_the_spec_has_pools_of_each_model(tmp_path: Path) -> None:
    folder = resolve("smollm2")
    options = launch(
        "--model", "smollm2", "--model", "smollm2 served-model-name=x decode=2 prefill=0"
    )
    (second,) = options.further()
    more = [FurtherModel(second, folder, "x")]
    spec = make_spec(options, cluster_id="c", run_folder=tmp_path, model=folder.path, more=more)
    assert spec.wanted == {"router": 1, "prefill": 1, "decode": 1, "x.prefill": 0, "x.decode": 2}
    command = spec.pools["x.decode"].command
    assert command[command.index("--group") + 1] == "x"
    assert command[command.index("--role") + 1] == "decode"
    assert "--group" not in spec.pools["decode"].command
    for pool in ("router", "grpc"):
        words = spec.pools[pool].command[3:]
        sent = parse(RouterOptions, "tandem router", _filled(words))
        (found,) = extended(sent, RouterConfig, cluster=CLUSTER).further()
        assert (found.model, found.group, found.served_model_name) == (str(folder.path), "x", "x")
    added, _ = plan(spec, spec.wanted, [])
    names = [m.member_id for m in added]
    assert names[:3] == ["router-0", "decode-0", "x.decode-0"]
    assert sorted(names[3:]) == ["grpc-0", "prefill-0", "x.decode-1"]


def _filled(words: list[str]) -> list[str]:
    return [{"{id}": "router-0"}.get(w, "1" if w.endswith("port}") else w) for w in words]


def test_names_of_pools() -> None:
    assert pool_name("", "decode") == "decode"
    assert pool_name("qwen2.5", "decode") == "qwen2.5.decode"
    for pool, group, role in (("decode", "", "decode"), ("qwen2.5.prefill", "qwen2.5", "prefill")):
        assert (group_of(pool), role_of(pool)) == (group, role)
    assert group_name("Qwen/Qwen2.5 0.5B") == "qwen2.5-0.5b"
    assert group_name("/models/My_Model.gguf") == "my-model"
    assert group_name("///") == ""


def test_a_model_for_all_workers_of_a_gpu() -> None:
    options = replace(launch("--model", "a", "--model", "b decode=2"), engine=launch().engine)
    assert options.workers_on_gpu(1) == 5
    (second,) = options.further()
    assert second.engine_on(1, 5).gpu_memory_utilization == pytest.approx(0.18)


def test_workers_of_a_model_on_the_cpu_take_no_part_of_a_gpu() -> None:
    options = launch("--model", "a", "--model", "b device=cpu decode=7")
    assert options.workers_on_gpu(1) == 2  # those of the first model
    options = launch("--model", "a", "--device", "cpu", "--model", "b device=cuda decode=2")
    assert options.workers_on_gpu(1) == 3


def test_pools_of_roles_that_this_version_does_not_know_are_left_out() -> None:
    pools = json.dumps({"decode": {"wanted": 1}, "b.decode": {"wanted": 2}, "b.new": {"wanted": 3}})
    assert decode_pools(pools_of_group(pools.encode(), "b")) == {"decode": {"wanted": 2}}
