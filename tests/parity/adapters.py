"""Adapters produce the tokens of merged weights, however their KV was obtained, in parallel with
the base model.

Each prompt is sent for the base and two adapters concurrently, and twice: the second time its KV is
cached. One adapter is loaded at startup, the other while the clusters run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch
from transformers import PreTrainedModel

from tandem.models.config.model import ModelConfig
from tandem.models.source import read_folder
from tests.harness.client import open_client
from tests.lora_adapters import ALL, merged, write_adapter
from tests.parity.ways import Answer, ParityRequest, Way, all_disturbed, send_all_ways

_NUM_TOKENS = 48
_PROMPTS = [
    torch.randint(1000, 9000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (97, 90, 65, 100)
]
BASE = "model"
_NAMES = (BASE, "early", "late")


def _make_request(name: str, prompt: list[int]) -> ParityRequest:
    return "/v1/completions", {
        "model": name,
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _token_ids(answer: Answer) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


async def _load(way: Way, path: Path, **more: bool) -> httpx.Response:
    async with httpx.AsyncClient(base_url=way.cluster.admin_url, timeout=60) as client:
        body = {"lora_name": "late", "lora_path": str(path), **more}
        return await client.post("/v1/load_lora_adapter", json=body)


def _check(model: PreTrainedModel, prompt: list[int], made: list[int]) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == made


def write_adapters(folder: Path, base: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Writes both adapters in the folder that contains BASE, the base model. Returns the merged
    models by request name."""
    config = read_folder(folder / BASE).config
    models = {BASE: base}
    for seed, (name, targets) in enumerate({"early": ALL, "late": ("q_proj", "v_proj")}.items()):
        made = write_adapter(folder / name, config, seed=seed, target_modules=list(targets))
        models[name] = merged(base, made)
    return models


def options(folder: Path) -> tuple[str, ...]:
    """The workers' options for the adapter that is loaded at startup."""
    return "--lora", f"early={folder / 'early'}", "--max-loras", "2"


def check(ways: Mapping[str, Way], folder: Path, models: Mapping[str, PreTrainedModel]) -> None:
    """Checks all ways, and then that an adapter's files can be replaced. `folder` stays as it is,
    for the next check."""
    with TemporaryDirectory() as own:
        late = Path(shutil.copytree(folder / "late", Path(own) / "late"))
        _check_ways(ways, folder, late, models)


def _check_ways(
    ways: Mapping[str, Way], folder: Path, late: Path, models: Mapping[str, PreTrainedModel]
) -> None:
    sent = [(name, prompt) for prompt in _PROMPTS for name in _NAMES]
    bodies = [_make_request(*one) for one in sent]
    for way in ways.values():
        reply = asyncio.run(_load(way, late))
        assert reply.status_code == 200, reply.text
    with all_disturbed(ways):
        first, again = (asyncio.run(send_all_ways(ways, bodies)) for _ in range(2))
    expected = list(map(_token_ids, first["aggregated"]))
    for (name, prompt), found in zip(sent, expected, strict=True):
        _check(models[name], prompt, found)
    for name in ways:
        for answers in (first[name], again[name]):
            assert list(map(_token_ids, answers)) == expected, name
            assert [answer["model"] for answer in answers[:3]] == list(_NAMES)
    config = read_folder(folder / BASE).config
    asyncio.run(_reload(ways["nixl"], config, late, models[BASE]))


async def _reload(way: Way, config: ModelConfig, late: Path, base: PreTrainedModel) -> None:
    """Replaces the files under one name: no block of the old ones may be found, locally or by a
    transfer."""
    made = write_adapter(late, config, seed=9, target_modules=["q_proj", "v_proj"])
    assert (await _load(way, late)).status_code == 400
    reply = await _load(way, late, load_inplace=True)
    assert reply.status_code == 200, reply.text
    changed = merged(base, made)
    async with open_client(way.cluster) as client:
        for expected_cached in (0, 96):
            path, body = _make_request("late", _PROMPTS[0])
            answer = (await client.post(path, json=body)).json()
            _check(changed, _PROMPTS[0], _token_ids(answer))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected_cached
        listed = (await client.get("/v1/models")).json()["data"]
        names = [(model["id"], model["parent"]) for model in listed]
        assert names == [(BASE, None), ("early", BASE), ("late", BASE)]
