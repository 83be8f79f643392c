from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.gpu_check import Cards, Driver
from tandem.cluster.launch import options as launch_options
from tandem.cluster.launch.options import (
    LaunchOptions,
    check_gpu_memory,
    check_gpus,
    make_spec,
)
from tandem.cluster.pools import plan
from tandem.common import cuda_build
from tandem.common.config.cluster import Pool
from tandem.common.config.router import AdmissionOptions
from tandem.common.options import parse, to_argv
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.source import resolve
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


def test_encode_workers_are_a_pool_only_if_it_has_a_size() -> None:
    folders = {"cluster_id": "c", "run_folder": Path("/run"), "model": Path("m")}
    assert "encode" not in make_spec(LaunchOptions(), **folders).pools  # type: ignore[arg-type]
    options = parse(LaunchOptions, "tandem up", ["--encode", "2", "--encode-deadline", "5"])
    spec = make_spec(options, **folders)  # type: ignore[arg-type]
    assert spec.wanted == {"router": 1, "prefill": 1, "decode": 1, "encode": 2}
    worker = parse_worker(command(options, "encode"))
    assert (worker.role, worker.transfer.encode_deadline_s) == ("encode", 5)
    assert parse_worker(command(options, "prefill")).transfer.encode_deadline_s == 5
    members, _ = plan(spec, spec.wanted, [])
    assert sum(m.pool == "encode" for m in members) == 2
    shrunk, leaving = plan(spec, {**spec.wanted, "encode": 0}, members)
    assert not shrunk
    assert [m.pool for m in leaving] == ["encode", "encode"]


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
    with pytest.raises(ConfigError, match=r"the cluster at 0\.0\.0\.0"):
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


DRIVER = Driver(580, "65.06")
GB = 10**9


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is built for CUDA 13."""
    version = {"torch": "2.13.0+cu130"}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: version.get(name, ""))


def refusal(words: str, num_gpus: int, driver: Driver = DRIVER, fault: str = "") -> str:
    options = parse(LaunchOptions, "tandem up", words.split())
    with pytest.raises(ConfigError) as refused:
        check_gpus(options, num_gpus, driver, Cards(fault=fault))
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.usefixtures("cuda_torch")
class TestGpus:
    @pytest.mark.parametrize(
        ("words", "num_gpus"),
        [
            ("--device cuda", 1),  # one prefill and one decode worker share the GPU
            ("--device cuda --decode 4", 5),
            ("--device cuda --tensor-parallel 2", 2),  # both workers share both GPUs
            ("--device cuda --tensor-parallel 2 --decode 3", 8),
            ("--device cuda --tensor-parallel 2 --ranks-share-gpu", 1),
            ("--device cuda --decode 4 --workers-per-gpu 3", 2),
            ("--device cuda --decode 4 --listen 10.0.0.1", 2),
            ("--device cuda --listen 10.0.0.1", 0),
            ("--decode 4", 1),
            ("--decode 4", 0),
            ("--device cpu", 0),
        ],
    )
    def test_workers_that_fit_or_that_wait_for_other_machines(
        self, words: str, num_gpus: int
    ) -> None:
        options = parse(LaunchOptions, "tandem up", words.split())
        check_gpus(options, num_gpus, DRIVER, Cards())

    def test_without_a_gpu(self) -> None:
        why = refusal("--device cuda", 0)
        assert "needs an NVIDIA GPU, but no GPU was found on this machine. Use --device cpu" in why

    def test_four_workers_on_one_gpu(self) -> None:
        assert refusal("--device cuda --prefill 2 --decode 2", 1) == (
            "4 workers do not fit on 1 GPU (at most 2 on one GPU). Lower --prefill or --decode, or "
            "let workers share a GPU's memory with --workers-per-gpu 4"
        )
        assert "5 workers do not fit on 2 GPUs (at most 1 on one GPU)" in refusal(
            "--device cuda --decode 4", 2
        )

    def test_ranks_need_a_gpu_each(self) -> None:
        two = "--device cuda --tensor-parallel 2"
        assert refusal(two, 1) == (
            "--tensor-parallel 2 needs 2 GPUs for each worker, but this machine has 1 GPU; lower "
            "--tensor-parallel, or use --device cpu"
        )
        assert refusal(f"{two} --decode 3", 5) == (
            "4 workers with 2 GPUs each do not fit on 5 GPUs (at most 1 on one GPU). Lower "
            "--prefill or --decode, or let workers share a GPU's memory with --workers-per-gpu 2"
        )

    @pytest.mark.parametrize("listen", ["", " --listen 10.0.0.1"])
    def test_a_driver_that_is_too_old(self, listen: str) -> None:
        assert refusal(f"--device cuda{listen}", 1, Driver(535, "129.03")) == (
            "--device cuda cannot be used: PyTorch is built for CUDA 13, which needs driver 580, "
            "and this machine has 535.129.03; update the driver, or install PyTorch's build for an "
            "older CUDA, or use --device cpu"
        )

    def test_a_driver_that_does_not_start(self) -> None:
        fault = "CUDA does not start: system has unsupported display driver (error 803)"
        said = refusal("--device cuda", 1, fault=fault)
        assert said.startswith(f"--device cuda cannot be used: {fault}; check the driver with ")

    def test_pytorch_for_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_build, "installed_version", lambda _: "2.13.0+cpu")
        assert "PyTorch is built for CPUs" in refusal("--device cuda", 1)
        options = parse(LaunchOptions, "tandem up", ["--device", "auto"])
        check_gpus(options, 1, Driver(535, ""), Cards())  # its workers use CPUs


@pytest.mark.parametrize(
    ("words", "num_gpus", "share"),
    [
        ("--device cuda", 0, 0.9),
        ("--device cuda", 1, 0.45),
        ("--device cuda", 2, 0.9),
        ("--device cuda --tensor-parallel 2", 2, 0.45),
        ("--device cuda --tensor-parallel 2", 4, 0.9),
        ("--device cuda --decode 3 --workers-per-gpu 4", 1, 0.225),
        ("--device cuda --decode 2 --workers-per-gpu 4", 1, 0.3),
        ("--device cuda --decode 6 --workers-per-gpu 7 --gpu-memory-utilization 0.8", 1, 0.1142),
        ("--decode 2", 1, 0.3),
        ("--decode 4", 2, 0.3),
        ("--device cpu --decode 4", 2, 0.9),
        ("--autoscale on --autoscale-max 3", 1, 0.15),
        ("--autoscale on --autoscale-max 3 --workers-per-gpu 2", 1, 0.45),
        ("--autoscale dry-run --autoscale-max 3", 1, 0.45),
        ("--device cuda --listen 10.0.0.1", 1, 0.9),
    ],
)
def test_the_workers_of_a_gpu_divide_its_memory(
    words: str, num_gpus: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_options, "count_gpus", lambda _: num_gpus)
    options = parse(LaunchOptions, "tandem up", words.split())
    for pool in ("prefill", "decode"):
        spec = make_spec(options, cluster_id="c", run_folder=Path("/run"), model=Path("m"))
        argv = spec.pools[pool].command  # type: ignore[index]
        option = "--gpu-memory-utilization"
        given = float(argv[argv.index(option) + 1]) if option in argv else 0.9
        assert given == pytest.approx(share)


class TestGpuMemory:
    """smollm2 has 134,515,008 parameters, of 2 bytes each in bfloat16."""

    @pytest.fixture
    def model(self) -> ModelFolder:
        return resolve("smollm2")

    @pytest.mark.parametrize(
        ("words", "sizes"),
        [
            ("", ()),
            ("", (1 * GB,)),
            ("--device cpu", (GB // 1000,)),
            ("--kv-memory 200000000", (1 * GB,)),
        ],
    )
    def test_enough_or_unknown(
        self, words: str, sizes: tuple[int, ...], model: ModelFolder
    ) -> None:
        options = parse(LaunchOptions, "tandem up", words.split())
        check_gpu_memory(options, model, Cards(sizes))

    def test_weights_that_are_larger_than_a_workers_part(self, model: ModelFolder) -> None:
        options = parse(LaunchOptions, "tandem up", ["--dtype", "bfloat16"])
        check_gpu_memory(options, model, Cards((GB // 2, GB // 2)))
        with pytest.raises(ConfigError) as refused:
            check_gpu_memory(options, model, Cards((GB // 2,)))
        assert refused.value.message == (
            "269,030,016 bytes of weights do not fit: each of 2 workers may use 225,000,000 of a "
            "GPU's 500,000,000 bytes (--gpu-memory-utilization 0.9); "
            "choose a smaller or a quantized model, start fewer workers on a GPU (--prefill, "
            "--decode), or use --device cpu"
        )

    def test_a_pool_that_is_larger_than_the_gpu(self) -> None:
        options = parse(LaunchOptions, "tandem up", ["--kv-memory", "600000000"])
        with pytest.raises(
            ConfigError, match=r"--kv-memory 600000000 does not fit .*: each of 2 workers"
        ):
            check_gpu_memory(options, None, Cards((GB,)))
        check_gpu_memory(options, None, Cards((GB, GB)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--decode", "1:gpu"], "the label 'gpu' must be NAME=VALUE"),
        (["--decode", "x:gpu=a"], "is not a whole number"),
        (["--decode", "99"], "at most 64"),
        (["--decode", "1:gpu=a"], "needs --listen"),
    ],
)
def test_a_pool_whose_size_or_labels_are_wrong_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(LaunchOptions, "tandem up", words)
