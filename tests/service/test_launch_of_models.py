"""`tandem up` with two models: one has no worker until a request for it arrives."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.waiting import wait_until
from tests.parity.models import make_random_model
from tests.service.test_cluster_launcher import RAY_IS_UP, START_DEADLINE_S, Up, _screen, started

pytestmark = pytest.mark.service

PROMPT = list(range(1000, 1040))
NUM_TOKENS = 8


def _ask(up: Up, model: str) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{up.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        token_ids: list[int] = json.load(reply)["choices"][0]["token_ids"]
    return token_ids


def test_a_request_starts_the_pool_of_a_model_at_zero_and_is_answered(tmp_path: Path) -> None:
    expected = {}
    for name, family in (("llama", "llama"), ("gemma", "gemma3")):
        (tmp_path / name).mkdir()
        model = make_random_model(tmp_path / name, family)
        made = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        expected[name] = made[0, len(PROMPT) :].tolist()
    asleep = "prefill=0 decode=0 autoscale=on autoscale-min=0 autoscale-max=1"
    options = ("--numerics", "invariant", "--no-grpc", "--model", str(tmp_path / "llama"))
    with started(tmp_path, *options, "--model", f"{tmp_path / 'gemma'} {asleep}") as up:
        listed = [each["id"] for each in up.get("/v1/models")["data"]]
        assert listed == ["llama", "gemma"]
        assert _ask(up, "llama") == expected["llama"]
        wait_until(lambda: RAY_IS_UP in _screen(up), START_DEADLINE_S)
        pools = up.get("/v1/cluster")["pools"]
        assert (pools["decode"]["ready"], pools["gemma.decode"]["ready"]) == (1, 0)
        assert _ask(up, "gemma") == expected["gemma"]
        pools = up.get("/v1/cluster")["pools"]
        assert (pools["gemma.decode"]["wanted"], pools["gemma.decode"]["ready"]) == (1, 1)
        assert pools["decode"]["wanted"] == 1
        workers = {w["worker_id"] for w in up.get("/v1/cluster")["workers"]}
        assert "gemma.decode-0" in workers
