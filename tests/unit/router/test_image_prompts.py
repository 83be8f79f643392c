"""The router prepares prompts with images, and sends them to workers as they are."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from PIL import Image

from tandem.api.openai.requests import parse_chat
from tandem.common.block_hash import Chain, hash_blocks
from tandem.common.prompt_image import image_marks
from tandem.engine.types import Mode
from tandem.errors import BadRequest
from tandem.models.images import ImageRules
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.request.job import model_input, prepare_request
from tandem.router.request.prompt.prompts import INLINE_COST_MAX, PromptPreparer
from tandem.router.request.request import ClientRequest
from tandem.worker.convert import sequence_spec

_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
_CHAIN = Chain(b"r" * 16, 16)
_ROWS = 5  # of each tile


@pytest.fixture
async def preparer(tmp_path: Path) -> AsyncIterator[tuple[PromptPreparer, ImageRules, Tokenizer]]:
    file = tokenizers.Tokenizer.from_file(str(resolve("smollm2").path / "tokenizer.json"))
    file.add_special_tokens(list(_TOKENS))
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    (tmp_path / "config.json").write_text("{}")
    rules = ImageRules("SmolVLM", {}, None, 32, True, _ROWS, file.token_to_id("<image>"))
    tokenizer = Tokenizer(tmp_path)
    made = PromptPreparer(tmp_path, tokenizer, num_processes=1, image_rules=rules)
    yield made, rules, tokenizer
    made.close()


def _request(*parts: str | Image.Image) -> ClientRequest:
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        file = io.BytesIO()
        part.save(file, "png")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": content}]
    return parse_chat({"messages": messages}, "a").requests[0]


_WIDE, _RED = Image.new("RGB", (64, 30)), Image.new("RGB", (10, 10), "red")


@pytest.mark.parametrize("before", ["a", "long " * INLINE_COST_MAX])
async def test_images_have_their_tokens_and_are_in_the_hashes(
    preparer: tuple[PromptPreparer, ImageRules, Tokenizer], before: str
) -> None:
    made, rules, tokenizer = preparer
    request = _request(before, _WIDE, "b", _RED)
    prepared = await made.prepare(request, _CHAIN, max_model_len=100_000)
    token_ids, images = prepared.token_ids, prepared.images
    assert [len(image.starts) for image in images] == [3, 1]  # two tiles and the whole
    places = [start + at for image in images for start in image.starts for at in range(_ROWS)]
    assert places == [at for at, token_id in enumerate(token_ids) if token_id == rules.token_id]
    run = "<image>" * _ROWS
    text = (
        f"{before}<fake_token_around_image><row_1_col_1>{run}<fake_token_around_image>"
        f"<row_1_col_2>{run}\n\n<fake_token_around_image><global-img>{run}"
        f"<fake_token_around_image>b<fake_token_around_image><global-img>{run}"
        "<fake_token_around_image>"
    )
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    marks = image_marks(images, _CHAIN.block_size)
    assert prepared.block_hashes == hash_blocks(_CHAIN.root, token_ids, 16, marks)
    other = await made.prepare(
        _request(before, _RED.resize((64, 30)), "b", _RED), _CHAIN, max_model_len=100_000
    )
    assert other.token_ids == token_ids
    first = min(marks)
    assert other.block_hashes[:first] == prepared.block_hashes[:first]
    assert not {*other.block_hashes[first:]} & {*prepared.block_hashes}


async def test_workers_get_the_prompt_as_the_router_made_it(
    preparer: tuple[PromptPreparer, ImageRules, Tokenizer],
) -> None:
    made, rules, tokenizer = preparer
    request = _request("a", _WIDE)
    prepared = await made.prepare(request, None, max_model_len=1000)
    job = prepare_request(
        request,
        prepared.token_ids,
        max_tokens=5,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
        bad_words=[],
        grammar="",
        images=prepared.images,
    )
    message = model_input(job, [7])
    spec = sequence_spec(message, sequence_id="a", mode=Mode.LOCAL)
    assert spec.token_ids == [*prepared.token_ids, 7]
    assert spec.images == prepared.images
    assert Image.open(io.BytesIO(spec.images[0].data)).size == _WIDE.size
    assert rules.digest_of(spec.images[0].data) == spec.images[0].digest
    # A worker that knows no images sees token ids that no model has.
    assert max(message.token_ids) > tokenizer.vocab_size


async def test_a_model_of_text_refuses_images(
    preparer: tuple[PromptPreparer, ImageRules, Tokenizer],
) -> None:
    made = PromptPreparer(Path(), preparer[2], num_processes=1)
    with pytest.raises(BadRequest, match="the messages have an image, but this model takes text"):
        await made.prepare(_request("a", _RED), None, max_model_len=1000)
    made.close()
