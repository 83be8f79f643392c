"""Images in prompts give the tokens of transformers on real workers, however a decode worker
obtains the KV (ways.py). Each chat is sent twice: the second time its KV is cached.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.harness.client import open_client
from tests.parity.ways import (
    WAYS,
    Answer,
    ParityRequest,
    Way,
    all_disturbed,
    send_all_ways,
    start_ways,
)
from tests.vision_models import (
    chat_part,
    data_url,
    make_image,
    make_vision_model,
    reference_prompt,
    reference_tokens,
)

_NUM_TOKENS = 80  # so many that requests still run when their worker leaves the pool
_BLOCK_SIZE = 16
_WIDE, _SMALL, _TALL = make_image(1, 90, 60), make_image(2, 20, 31), make_image(3, 31, 96)
_LIKE_WIDE = make_image(4, 90, 60)
_Chat = tuple[list[dict[str, Any]], list[Image.Image]]


def _user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def _chats() -> list[_Chat]:
    """One image, another one of the same size, two, and one in the second turn."""
    return [
        ([_user(chat_part(_WIDE), "What is it?")], [_WIDE]),
        ([_user(chat_part(_LIKE_WIDE), "What is it?")], [_LIKE_WIDE]),
        ([_user("Compare", chat_part(_SMALL), "with", chat_part(_TALL))], [_SMALL, _TALL]),
        (
            [
                _user("Hello"),
                {"role": "assistant", "content": "Hi."},
                _user(chat_part(_TALL), "and", chat_part(_WIDE)),
            ],
            [_TALL, _WIDE],
        ),
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # on two cores, five clusters need minutes to start
@pytest.mark.parametrize("names", [("aggregated", "nixl"), WAYS])
def test_the_tokens_are_those_of_transformers(
    names: tuple[str, ...], redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    folder, model = make_vision_model(tmp_path / "model")
    chats = _chats() if len(names) == 2 else [*_chats(), *_chats()]
    prompts = [reference_prompt(folder, *chat) for chat in chats]
    expected = [reference_tokens(model, *prompt, _NUM_TOKENS) for prompt in prompts]
    sent = [_request(messages) for messages, _ in chats]
    options = ("--dtype", "float32", "--block-size", str(_BLOCK_SIZE))
    chunks = ("--max-tokens-per-step", "37")
    model_folder = str(folder.path)
    with start_ways(redis_server, tmp_path, model_folder, *options, *chunks, names=names) as ways:
        with all_disturbed(ways):
            cold = asyncio.run(send_all_ways(ways, sent))
        warm = asyncio.run(send_all_ways(ways, sent))
        asyncio.run(_ask_other_apis(ways["aggregated"], prompts[0][0]))
    for name in names:
        for (prompt, _), tokens, first, again in zip(
            prompts, expected, cold[name], warm[name], strict=True
        ):
            for answer in (first, again):
                assert answer["prompt_token_ids"] == prompt
                assert answer["choices"][0]["token_ids"] == tokens, name
            if name in ("aggregated", "nixl", "grpc"):
                assert _num_cached(again) >= (len(prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE


def _request(messages: list[dict[str, Any]]) -> ParityRequest:
    body: dict[str, Any] = {"messages": messages, "max_tokens": _NUM_TOKENS, "temperature": 0}
    return "/v1/chat/completions", body | {"ignore_eos": True, "return_token_ids": True}


async def _ask_other_apis(way: Way, prompt: list[int]) -> None:
    """Asks for the first chat by the APIs of Anthropic and OpenAI's responses."""
    url = data_url(_WIDE)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    items = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What is it?"},
    ]
    asked: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": parts}], "max_tokens": _NUM_TOKENS},
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": items}], "max_output_tokens": _NUM_TOKENS},
        ),
    ]
    async with open_client(way.cluster) as client:
        for path, body in asked:
            reply = await client.post(path, json=body | {"model": "", "temperature": 0})
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            cached = usage.get("cache_read_input_tokens", 0)
            assert usage["input_tokens"] + cached in (len(prompt), len(prompt) + cached)
        counted = await client.post("/v1/messages/count_tokens", json=asked[0][1] | {"model": ""})
        assert counted.json()["input_tokens"] == len(prompt)


def _num_cached(answer: Answer) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0
