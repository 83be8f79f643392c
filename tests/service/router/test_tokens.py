"""/tokenize and /detokenize as vLLM's clients call them, on a router with
--strict-fields."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.models import encode_chat
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter
from tests.service.router.test_http import CHAT, ids

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"strict_fields": True}
UNFINISHED = [*CHAT, {"role": "assistant", "content": "Hello, I"}]
TWO_ENDS = {"add_generation_prompt": True, "continue_final_message": True}


async def ask(router: RunningRouter, path: str, **body: Any) -> Any:
    answer = await router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_tokens_of_a_prompt_and_back(router: RunningRouter) -> None:
    text = "Grüße aus Köln 🙂! <|im_end|>"
    for add in (True, False):
        expected = router.tokenizer.encode(text, add_special_tokens=add)
        made = await ask(router, "/tokenize", model="tiny", prompt=text, add_special_tokens=add)
        assert made == {
            "tokens": expected,
            "count": len(expected),
            "max_model_len": 2048,
            "token_strs": None,
        }
    spelled = await ask(router, "/tokenize", prompt=text, return_token_strs=True)
    assert spelled["token_strs"] == router.tokenizer._tokenizer.encode(text).tokens
    back = await ask(router, "/detokenize", model="tiny", tokens=expected)
    assert back == {"prompt": text}
    plain = await ask(router, "/detokenize", tokens=expected, skip_special_tokens=True)
    assert plain["prompt"] == text.removesuffix("<|im_end|>")
    assert (await ask(router, "/detokenize", tokens=[]))["prompt"] == ""


async def test_several_prompts_get_lists(router: RunningRouter) -> None:
    made = await ask(router, "/tokenize", prompt=["a", "b c"])
    assert made["tokens"] == [ids(router, "a"), ids(router, "b c")]
    assert made["count"] == [1, 2]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ],
)
async def test_a_chat_has_the_same_ids_for_tokenize_for_chats_and_over_grpc(
    router: RunningRouter, flags: dict[str, bool]
) -> None:
    router.script(saying(ids(router, " am here")))
    expected = encode_chat(router.tokenizer, UNFINISHED, **flags)
    made = await ask(router, "/tokenize", messages=UNFINISHED, **flags)
    assert made["tokens"] == expected
    chat = {"messages": UNFINISHED, "max_tokens": 1, **flags}
    await ask(router, "/v1/chat/completions", **chat)
    messages = [pb.ChatMessage(**message) for message in UNFINISHED]
    request = pb.GenerateRequest(chat=pb.Chat(messages=messages, **flags), max_tokens=1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        async for _ in InferenceStub(channel).Generate(request, timeout=20):
            pass
    assert [list(s.input.token_ids) for s in router.submitted] == [expected] * 2  # type: ignore[attr-defined]


async def test_a_long_prompt_is_counted_and_a_huge_one_refused(router: RunningRouter) -> None:
    text = " international" * 2100
    made = await ask(router, "/tokenize", prompt=text)
    assert made["count"] == len(ids(router, text)) > made["max_model_len"]
    answer = await router.http.post("/tokenize", json={"prompt": " 1x" * 40_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": []}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "wings": 2}, 400, "wings"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, 400, "tools"),
        ("/tokenize", {"messages": CHAT, **TWO_ENDS}, 400, "add_gen"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 20]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 2049}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": "x", "wings": 2}, 400, "wings"),
        ("/v1/chat/completions", {"messages": CHAT, "wings": 2}, 400, "wings"),
    ],
)
async def test_refusals_name_the_field(
    router: RunningRouter, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await router.http.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"].startswith(param)
    assert not router.submitted
