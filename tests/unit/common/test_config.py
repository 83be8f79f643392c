"""Settings are checked when they are made, and say what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest

from tandem.common.config.cluster import (
    CLUSTER_ID_VARIABLE,
    REDIS_URL_VARIABLE,
    TOKEN_VARIABLE,
    ClusterConfig,
)
from tandem.common.config.engine import EngineConfig
from tandem.common.config.router import RouterConfig, parse_scale_objects
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.errors import ConfigError

CLUSTER = ClusterConfig(cluster_id="c", redis_url="redis://:hush@localhost", token="hush")
ENVIRONMENT = {
    CLUSTER_ID_VARIABLE: "c",
    REDIS_URL_VARIABLE: "redis://:hush@localhost",
    TOKEN_VARIABLE: "hush",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_cluster_is_read_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert ClusterConfig.from_environment() == CLUSTER


@pytest.mark.parametrize("name", ENVIRONMENT)
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named(
    environment: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    environment.delenv(name) if value is None else environment.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        ClusterConfig.from_environment()


def test_objects_whose_scale_is_a_pools_size() -> None:
    assert parse_scale_objects("") == {}
    text = "prefill=statefulsets/my-prefill,router=deployments/my.router"
    assert parse_scale_objects(text) == {
        "prefill": "statefulsets/my-prefill",
        "router": "deployments/my.router",
    }
    for wrong in (
        "prefill",
        "prefill=my-prefill",
        "gpu=statefulsets/x",
        "decode=pods/x",
        "decode=statefulsets/../x",
        "decode=statefulsets/x,decode=statefulsets/y",
    ):
        with pytest.raises(ConfigError, match="scale-objects has"):
            parse_scale_objects(wrong)


def test_secrets_are_not_in_the_repr() -> None:
    worker = WorkerConfig(
        role="decode",
        cluster=CLUSTER,
        engine=EngineConfig(model="m"),
        transfer=TransferConfig(),
        worker_id="w",
    )
    assert "hush" not in repr(worker)


def test_nothing_is_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        CLUSTER.cluster_id = "other"  # type: ignore[misc]


ENGINE = EngineConfig(model="m")
WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: replace(ENGINE, device="tpu"), "device is 'tpu'; it must be one of auto, cpu, cuda"),
    (lambda: replace(ENGINE, dtype="float16"), "dtype is 'float16'"),
    (lambda: replace(ENGINE, kv_dtype="int2"), "kv-dtype is 'int2'"),
    (lambda: replace(ENGINE, numerics="exact"), "numerics is 'exact'"),
    (lambda: replace(ENGINE, block_size=0), "block-size is 0; it must be at least 1"),
    (lambda: replace(ENGINE, kv_bytes_max=-1), "kv-memory"),
    (lambda: replace(ENGINE, max_num_seqs=0), "max-num-seqs"),
    (lambda: replace(ENGINE, max_tokens_per_step=0), "max-tokens-per-step"),
    (lambda: replace(ENGINE, itl_target_s=-0.1), "itl-target is -0.1"),
    (lambda: replace(ENGINE, queue_max=0), "queue-max"),
    (lambda: replace(ENGINE, num_threads=0), "threads"),
    (lambda: replace(ENGINE, numerics="invariant", dtype="bfloat16"), "float32"),
    (lambda: replace(ENGINE, numerics="invariant", kv_dtype="bfloat16"), "float32"),
    (lambda: TransferConfig(transport="tcp"), "auto, cuda_ipc, nixl, grpc"),  # type: ignore[arg-type]
    (
        lambda: WorkerConfig(
            role="router",  # type: ignore[arg-type]
            cluster=CLUSTER,
            engine=ENGINE,
            transfer=TransferConfig(),
            worker_id="w",
        ),
        "role is 'router'; it must be one of prefill, decode",
    ),
    (lambda: EngineConfig(model="m", ranks_share_gpu=True), "but tensor-parallel is 1"),
    (lambda: EngineConfig(model="m", expert_parallel=True), "but tensor-parallel is 1"),
    (
        lambda: EngineConfig(
            model="m", expert_parallel=True, tensor_parallel=2, numerics="invariant"
        ),
        "cannot be used with numerics invariant",
    ),
    (
        lambda: RouterConfig(
            cluster=CLUSTER, model="m", served_model_name="m", hold_requests_max=0
        ),
        "hold-requests-max",
    ),
    (
        lambda: RouterConfig(cluster=CLUSTER, model="m", served_model_name="m", ttft_limit_s=-1),
        "ttft-limit is -1",
    ),
    (
        lambda: RouterConfig(cluster=CLUSTER, model="m", served_model_name="m", hold_deadline_s=-1),
        "hold-deadline is -1",
    ),
    (
        lambda: RouterConfig(
            cluster=CLUSTER, model="m", served_model_name="m", ttft_limit_token_s=float("nan")
        ),
        "ttft-limit-token is nan",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_setting_is_refused_with_what_is_allowed(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
