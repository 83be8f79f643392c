"""Options from the command line, variables and a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.cluster.launch.config_show import show_config
from tandem.cluster.launch.joined_host import JoinOptions
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.option_sources import Sourced, parse_from_sources, read_from_sources
from tandem.errors import ConfigError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own variables set no option."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tandem.yaml"


def options(*argv: str) -> Sourced[LaunchOptions]:
    return parse_from_sources(LaunchOptions, "tandem up", argv)


def test_the_first_source_that_has_an_option_wins(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("prefill: 2\ndecode: 2\nport: 7000\nadmin-port: 7001\n")
    monkeypatch.setenv("TANDEM_DECODE", "3")
    monkeypatch.setenv("TANDEM_PORT", "7100")
    found = options("--config", str(file), "--port", "7200")
    assert (found.settings.num_prefill, found.settings.num_decode) == (2, 3)
    assert (found.settings.http_port, found.settings.admin.port) == (7200, 7001)
    assert found.sources == {
        "--config": "command line",
        "--port": "command line",
        "--decode": "TANDEM_DECODE",
        "--prefill": str(file),
        "--admin-port": str(file),
    }


def test_values_of_a_file_are_those_of_a_command_line(file: Path) -> None:
    file.write_text(
        "autoscale: on\nno-grpc: true\noverlap: no\nkv-memory: 4GiB\nitl_target: 90ms\n"
        "listen: 10.0.0.1\nlora: {a: /x, b: /y}\nlabels: [gpu=H100, zone=a]\nkv-tier-policy: lru\n"
        "decode: 1:gpu=H100\n"
    )
    same = options(
        *[
            "--autoscale",
            "on",
            "--no-grpc",
            "--no-overlap",
            "--kv-memory",
            "4294967296",
            "--itl-target",
            "0.09",
        ],
        *["--listen", "10.0.0.1", "--lora", "a=/x,b=/y", "--labels", "gpu=H100,zone=a"],
        *["--kv-tier-policy", "lru", "--decode", "1:gpu=H100"],
    )
    assert options("--config", str(file)).settings == same.settings


def test_a_variable_names_the_file_and_flags_have_variables(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("block-size: 32")
    monkeypatch.setenv("TANDEM_CONFIG", str(file))
    monkeypatch.setenv("TANDEM_NO_GRPC", "true")
    monkeypatch.setenv("TANDEM_OVERLAP", "0")
    monkeypatch.setenv("TANDEM_KV_MEMORY", "500MB")
    settings = options().settings
    assert (settings.engine.block_size, settings.engine.kv_bytes_max) == (32, 500_000_000)
    assert (settings.no_grpc, settings.transfer.overlap) == (True, False)


def test_other_variables_of_tandem_set_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "CLUSTER_ID", "API_KEY", "ADMIN_URL", "URL", "LOG_LEVEL", "DEV"):
        monkeypatch.setenv(f"TANDEM_{name}", "x")
    found = options()
    assert (found.settings, found.sources) == (LaunchOptions(), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", r'Unknown option: "\[prot\]" from .*tandem.yaml'),
        ("port: soon", r"Invalid value for \[port\] from .*tandem.yaml"),
        ("port: 0", "port is 0; it must be at least 1"),
        ("port", "must have lines such as `port: 8000`"),
        (
            "no-overlap: true",
            r"\[no-overlap\] is an option of the command line only; set overlap to false",
        ),
        ("port: [", "cannot be read as YAML"),
        ("\0", "cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_named(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        options("--config", str(file))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: there is no file .*/none"):
        options("--config", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot be read as YAML: .*Is a directory"):
        options("--config", str(tmp_path))
    (tmp_path / "empty").write_text("# nothing\n")
    assert options("--config", str(tmp_path / "empty")).settings == LaunchOptions()


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TTFT_LIMIT", "5x")
    with pytest.raises(
        ConfigError, match='Invalid value for TANDEM_TTFT_LIMIT: "5x" is not a time'
    ):
        options()
    monkeypatch.setenv("TANDEM_TTFT_LIMIT", "5s")
    monkeypatch.setenv("TANDEM_NO_OVERLAP", "1")
    with pytest.raises(
        ConfigError, match=r"TANDEM_NO_OVERLAP is an option .* only; set overlap to false instead"
    ):
        options()


def test_variables_of_kubernetes_are_no_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("TANDEM_ADMIN_PORT", "tcp://10.0.0.1:81")
    monkeypatch.setenv("TANDEM_PORT_80_TCP", "tcp://10.0.0.1:80")
    monkeypatch.setenv("TANDEM_SERVICE_HOST", "10.0.0.1")
    assert options().settings == LaunchOptions()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "tandem up: TANDEM_ADMIN_PORT=tcp://10.0.0.1:81 is ignored: Kubernetes sets this variable "
        "for the Service tandem-admin, so it is not read as an option of Tandem",
        "tandem up: TANDEM_PORT=tcp://10.0.0.1:80 is ignored: Kubernetes sets this variable for "
        "the Service tandem, so it is not read as an option of Tandem",
    ]


def test_processes_that_are_started_get_no_variable_of_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DECODE", "2")
    monkeypatch.setenv("TANDEM_PORT", "7000")
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    settings = read_from_sources(LaunchOptions, "tandem up", ["--port", "7100"]).settings
    assert (settings.num_decode, settings.http_port) == (2, 7100)
    assert [name for name in os.environ if name.startswith("TANDEM_")] == ["TANDEM_LOG_LEVEL"]


def test_join_reads_them_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("token-file: t\nca-sha256: ab\n")
    monkeypatch.setenv("TANDEM_ADDRESS", "10.0.0.1:8100")
    found = parse_from_sources(JoinOptions, "tandem join", ["--config", str(file)]).settings
    assert (found.host_and_port, found.token_file) == (("10.0.0.1", 8100), "t")


def test_the_options_in_force_are_shown_without_secrets(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("kv-memory: 4GiB\nautoscale: on\n")
    monkeypatch.setenv("TANDEM_PORT", "7000")
    monkeypatch.setenv("TANDEM_REDIS", "redis://user:secret@h:6379/0?password=secret")
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    show_config(["--config", str(file), "--decode", "3"])
    shown = capsys.readouterr().out
    assert "secret" not in shown
    lines = shown.splitlines()
    assert "decode: 3  # command line" in lines
    assert "port: 7000  # TANDEM_PORT" in lines
    assert f"kv-memory: 4GiB  # {file}" in lines
    assert f"autoscale: 'on'  # {file}" in lines
    assert "redis: redis://user:***@h:6379/0?password=***  # TANDEM_REDIS" in lines
    assert "max-num-seqs: 64" in lines
    assert "# The API key is *** (variable TANDEM_API_KEY)." in lines


def test_what_is_shown_is_a_file_for_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--kv-memory",
        "500MB",
        "--lora",
        "a=/x",
        "--no-overlap",
        "--ttft-limit",
        "5m",
        "--cors-origins",
        "*",
    ]
    show_config(argv)
    file.write_text(capsys.readouterr().out)
    assert options("--config", str(file)).settings == options(*argv).settings
