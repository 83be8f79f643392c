from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.launch.options import LaunchOptions, check_gpus, make_spec
from tandem.common.config.cluster import Pool
from tandem.common.config.router import AdmissionOptions
from tandem.common.options import parse, to_argv
from tandem.errors import ConfigError
from tests.harness.programs import parse_router, parse_worker


def command(options: LaunchOptions, pool: Pool) -> list[str]:
    """A pool's command, without what an agent fills in."""
    spec = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m"))
    words = spec.pools[pool].command
    ports = {f"{{{name}}}": str(number) for number, name in enumerate(spec.pools[pool].ports, 1)}
    filled = [{"{cores}": "0", **ports}.get(w, w) for w in words]
    return ["tandem", filled[2].removeprefix("tandem."), *filled[3:]]


def test_a_router_is_told_the_autoscalers_mode_and_bounds() -> None:
    given = parse_router(
        command(LaunchOptions(autoscale="on", autoscale_min=0, autoscale_max=3), "router")
    ).autoscale
    assert (given.mode, given.prefill_max, given.decode_max) == ("on", 3, 3)
    assert (given.prefill_min, given.decode_min) == (0, 0)
    assert given.cold_start_s == 15


def test_what_it_is_told_reaches_the_processes() -> None:
    words = ["--ttft-limit", "7", "--trust-tenant-header", "--transport", "grpc", "--no-overlap"]
    words += ["--num-blocks", "9", "--itl-limit", "0.25", "--warm-blocks", "4", "--threads", "2"]
    options = parse(LaunchOptions, "tandem up", words)
    router = parse_router(command(options, "router"))
    assert (router.ttft_limit_s, router.trust_tenant_header) == (7, True)
    for role in ("prefill", "decode"):
        worker = parse_worker(command(options, role))
        assert worker.transfer == options.transfer
        engine = worker.engine
        assert (engine.num_blocks, engine.itl_limit_s, engine.num_threads) == (9, 0.25, 2)


def test_a_process_of_its_own_serves_grpc() -> None:
    options = LaunchOptions(admission=AdmissionOptions(grpc_memory=1 << 26))
    router = parse_router(command(options, "router"))
    replica = parse_router(command(options, "grpc"))
    assert (router.api, replica.api, replica.grpc_memory) == ("http", "grpc", 1 << 26)
    pools = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m")).pools
    assert (pools["router"].ports["http_port"], pools["grpc"].ports["grpc_port"]) == (8000, 8001)
    others = ("http_port", "admin_port", "admin_grpc_port")
    assert [pools["grpc"].ports[name] for name in others] == [0, 0, 0]
    options = LaunchOptions(listen="10.0.0.1", cluster_port=9000)
    pools = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m")).pools
    assert [pools["grpc"].ports[name] for name in others] == [9010, 9011, 9012]


def test_grpc_can_be_off() -> None:
    options = parse(LaunchOptions, "tandem up", ["--no-grpc", "--port", "8001"])
    assert "--grpc-port" not in options.ports
    pools = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m")).pools
    assert list(pools) == ["router", "prefill", "decode"]
    assert parse_router(command(options, "router")).api == "http"


def test_what_a_router_would_refuse_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="autoscale is 'maybe'"):
        LaunchOptions(autoscale="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="autoscale-prefill-max, which is 0"):
        LaunchOptions(autoscale="on", autoscale_max=0)


def test_processes_get_the_certificate_of_their_kind() -> None:
    router = parse_router(command(LaunchOptions(), "router"))
    assert router.tls_dir == "/run/tls/router"
    for role in ("prefill", "decode"):
        assert parse_worker(command(LaunchOptions(), role)).tls_dir == "/run/tls/worker"
    clear = LaunchOptions(no_cluster_tls=True)
    assert parse_router(command(clear, "router")).tls_dir == ""
    assert parse_worker(command(clear, "decode")).tls_dir == ""


def test_a_public_certificate_reaches_the_router_and_the_urls() -> None:
    options = parse(LaunchOptions, "tandem up", ["--tls-cert", "a.crt", "--tls-key", "a.key"])
    assert parse_router(command(options, "router")).tls == options.tls
    assert options.http_url == "https://127.0.0.1:8000"
    assert options.admin_url.startswith("http://")  # on loopback
    with pytest.raises(ConfigError, match="must be given together"):
        parse(LaunchOptions, "tandem up", ["--tls-cert", "a.crt"])


def test_the_admin_listener_stays_on_loopback_when_the_public_one_moves() -> None:
    words = ["--host", "0.0.0.0", "--allow-anonymous", "--admin-port", "9002"]
    options = parse(LaunchOptions, "tandem up", words)
    router = parse_router(command(options, "router"))
    assert (router.host, router.admin.host) == ("0.0.0.0", "127.0.0.1")
    assert options.admin_url == "http://127.0.0.1:9002"
    with pytest.raises(ConfigError, match=r"reaches 0\.0\.0\.0"):
        parse(LaunchOptions, "tandem up", ["--admin-host", "0.0.0.0"])
    with pytest.raises(ConfigError, match="--port and --admin-port are both 9000"):
        parse(LaunchOptions, "tandem up", ["--port", "9000", "--admin-port", "9000"])


def test_a_pool_may_ask_for_labels() -> None:
    words = ["--listen", "10.0.0.1", "--decode", "1:gpu=H100,zone=a", "--prefill", "3"]
    options = parse(LaunchOptions, "tandem up", words)
    assert parse(LaunchOptions, "tandem up", to_argv(options)) == options
    spec = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m"))
    assert spec.wanted == {"router": 1, "prefill": 3, "decode": 1}
    assert spec.selectors["decode"] == {"gpu": "H100", "zone": "a"}
    assert spec.selectors["prefill"] == {}


@pytest.mark.parametrize(
    ("words", "device", "limit"),
    [
        ("--device cpu", "cpu", None),
        ("--device auto", "auto", None),
        ("--device auto --workers-per-gpu 1", "auto", 1),
        ("--device cuda", "cuda", 1),
        ("--device cuda --workers-per-gpu 2", "cuda", 2),
    ],
)
def test_workers_on_gpus_share_them_if_told_or_if_they_would_do_without(
    words: str, device: str, limit: int | None
) -> None:
    options = parse(LaunchOptions, "tandem up", words.split())
    spec = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m"))
    assert [spec.pools[p].device for p in spec.pools] == ["cpu", "cpu", device, device]
    assert spec.workers_per_gpu == limit


def test_more_workers_than_the_gpus_take_are_refused_where_no_machine_can_join() -> None:
    words = ["--device", "cuda", "--prefill", "1", "--decode", "4"]
    options = parse(LaunchOptions, "tandem up", words)
    check_gpus(options, 5)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and this machine shows none"):
        check_gpus(options, 0)
    with pytest.raises(ConfigError, match=r"5 workers .* 2 GPUs .* --workers-per-gpu to 3"):
        check_gpus(options, 2)
    check_gpus(parse(LaunchOptions, "tandem up", [*words, "--workers-per-gpu", "3"]), 2)
    check_gpus(parse(LaunchOptions, "tandem up", [*words, "--listen", "10.0.0.1"]), 2)
    check_gpus(parse(LaunchOptions, "tandem up", words[2:]), 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--decode", "1:gpu"], "the label 'gpu' must be NAME=VALUE"),
        (["--decode", "x:gpu=a"], "is not a whole number"),
        (["--decode", "99"], "at most 64"),
        (["--decode", "1:gpu=a"], "so --listen is needed"),
    ],
)
def test_a_pool_whose_size_or_labels_are_wrong_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(LaunchOptions, "tandem up", words)
