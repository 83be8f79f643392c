"""Command lines from settings and back; what is generated from the settings is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.groups import MEASUREMENT
from tandem.common.config.router import RouterOptions
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerOptions
from tandem.common.option_sources import read_from_sources
from tandem.common.options import Options, arguments, extended, parse, read, to_argv
from tandem.errors import ConfigError

ROOT = Path(__file__).parents[3]
PROGRAMS = [WorkerOptions, RouterOptions, LaunchOptions]
WORKER = WorkerOptions(
    role="decode",
    engine=EngineConfig(model="m", num_blocks=7, kv_bytes_max=1 << 20, itl_limit_s=0.25),
    transfer=TransferConfig(overlap=False, transport="grpc", warm_blocks=3),
    cores=(0, 3),
    generation="b.2",
)
ROUTER = RouterOptions(
    model="m",
    trust_tenant_header=True,
    scale_objects={"decode": "statefulsets/x", "router": "deployments/y"},
    allowed_hosts=("a", "b"),
    autoscale=AutoscaleConfig(mode="dry-run", prefill_min=0, ttft_token_s=0.001),
)


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/reference/generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_and_chart_are_those_of_the_settings(generator: ModuleType) -> None:
    for path, text in generator.generated().items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path} is old: run make options"


def test_every_option_has_a_help_text(generator: ModuleType) -> None:
    for program in generator.PROGRAMS:
        for argument in generator._options(program):
            assert argument.parameter.help, argument.name


@pytest.mark.parametrize("settings", [WORKER, ROUTER, LaunchOptions(parent_pid=5)])
def test_a_command_line_makes_the_same_settings_again(settings: Options) -> None:
    assert parse(type(settings), "tandem", to_argv(settings)) == settings


def test_zero_is_none_where_a_default_is_found_out() -> None:
    line = ["--role", "decode", "--model", "m", "--num-blocks", "0", "--max-model-len=0"]
    engine = parse(WorkerOptions, "tandem", line).engine
    assert (engine.num_blocks, engine.max_model_len) == (None, None)


def test_the_last_of_several_wins() -> None:
    line = "--role prefill --model m --cores 1 --threads 2 --role decode --threads 3 --cores 4,5"
    worker = parse(WorkerOptions, "tandem", line.split())
    assert (worker.role, worker.engine.num_threads, worker.cores) == ("decode", 3, (4, 5))
    assert parse(WorkerOptions, "tandem", [*WORKER_LINE, "--no-overlap", "--overlap"]) == parse(
        WorkerOptions, "tandem", WORKER_LINE
    )


def test_constants_are_no_options() -> None:
    names = {a.name for a in arguments(RouterOptions) if a.parse}
    assert "--ttft-limit" in names
    assert names.isdisjoint({"--body-bytes-max", "--service-account", "--autoscale-history"})


def test_a_subclass_has_the_values_and_more() -> None:
    base = TransferConfig(overlap=False)
    assert extended(base, TransferConfig, delay_s=2.0) == TransferConfig(overlap=False, delay_s=2.0)


WORKER_LINE = ["--role", "decode", "--model", "m"]
WRONG: list[tuple[type[Any], list[str], str]] = [
    (WorkerOptions, [*WORKER_LINE, "--device", "tpu"], 'tpu" for --device.+"auto", "cpu", "cuda"'),
    (WorkerOptions, ["--role", "router", "--model", "m"], '"prefill", "decode"'),
    (WorkerOptions, [*WORKER_LINE, "--block-size", "0"], "block-size is 0; it must be at least 1"),
    (WorkerOptions, [*WORKER_LINE, "--block-size", "x"], "--block-size"),
    (WorkerOptions, [*WORKER_LINE, "--num-blocks", "x"], '--num-blocks: "x" is not a whole number'),
    (WorkerOptions, [*WORKER_LINE, "--cores", "0,x"], '--cores: "x" is not a whole number'),
    (WorkerOptions, [*WORKER_LINE, "--pull-deadline", "nan"], "pull-deadline is nan; .* above 0"),
    (WorkerOptions, [*WORKER_LINE, "--pull-deadline", "inf"], "must be a finite number"),
    (WorkerOptions, [*WORKER_LINE, "--generation", "a/b"], "generation is 'a/b'; it must match"),
    (WorkerOptions, [*WORKER_LINE, "--blok-size", "1"], "--blok-size. Did you mean --block-size"),
    (WorkerOptions, [*WORKER_LINE, "more"], "more"),
    (WorkerOptions, [*WORKER_LINE, "--threads"], "--threads requires an argument"),
    (WorkerOptions, ["--role", "decode"], "--model must be given"),
    (RouterOptions, ["--model", "m", "--scale-objects", "x"], "scale-objects has the entry 'x'"),
    (RouterOptions, ["--model", "m", "--autoscale-ttft", "0"], "autoscale-ttft is 0; .* above 0"),
    (RouterOptions, ["--model", "m", "--http-port", "65536"], "must be at most 65535"),
    (LaunchOptions, ["--port", "0"], "port is 0; it must be at least 1"),
    (LaunchOptions, ["--port", "8001"], "both 8001; they must differ"),
    (LaunchOptions, ["--prefill", "65"], "prefill is 65; it must be at most 64"),
    (LaunchOptions, ["--ttft-limit", "-1"], "ttft-limit is -1; it must be at least 0"),
]


@pytest.mark.parametrize(("made", "line", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_a_wrong_option_is_one_line_and_status_2(
    made: type[Any], line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(made, "tandem program", line)
    with pytest.raises(SystemExit) as ended:
        read(made, "tandem program", line)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("tandem program: ")


@pytest.mark.parametrize(
    ("made", "flag"),
    [(WorkerOptions, "--help"), (RouterOptions, "--help"), (LaunchOptions, "--help-all")],
)
def test_help_names_every_option_but_those_for_tests(
    made: type[Any], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(made, "tandem program", [flag])
    assert not ended.value.code
    said = capsys.readouterr().out
    options = [a for a in arguments(made) if a.parse]
    for_tests = [a.name for a in options if a.parameter.group == (MEASUREMENT,)]
    assert "--transfer-delay" in for_tests or made is RouterOptions
    assert [a.name for a in options if a.name not in said] == for_tests


def test_short_help_shows_what_most_people_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        read_from_sources(LaunchOptions, "tandem up", ["-h"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    shown = [line.split()[1] for line in lines if line.startswith("│ --")]
    listed = [name for names in LaunchOptions.SHORT_HELP.values() for name in names]
    assert shown == [*listed, "--help", "--help-all"]
    assert 18 <= len(listed) <= 24
    assert lines[0] == "Usage: tandem up [MODEL] [OPTIONS]"


@pytest.mark.parametrize("made", PROGRAMS)
def test_help_is_shown_wherever_it_stands(
    made: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(made, "tandem program", ["--threads", "2", "--help"])
    assert not ended.value.code
    assert "Usage" in capsys.readouterr().out
