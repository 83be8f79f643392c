"""Images in chats of the Python API: a tiny SmolVLM gives the tokens of transformers."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedModel

from tandem import LLM, SamplingParams
from tandem.errors import BadRequest
from tandem.models.folder import ModelFolder
from tests.tiny_models import make_random_speaker
from tests.vision_models import (
    RUN_LENGTH,
    as_url,
    chat_part,
    data_url,
    make_image,
    make_vision_model,
    reference_prompt,
    reference_tokens,
)

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
}
WIDE = make_image(1, 90, 60)
SMALL = make_image(2, 20, 31)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, PreTrainedModel]:
    return make_vision_model(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(made: tuple[ModelFolder, PreTrainedModel], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(made[0].path, kernels=request.param, **SETTINGS) as opened:
        yield opened


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


CHATS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "one": ([user(chat_part(WIDE), "What is it?")], [WIDE]),
    "two": ([user("Compare", chat_part(SMALL), "with", chat_part(WIDE))], [SMALL, WIDE]),
    "second turn": (
        [
            user("Hello"),
            {"role": "assistant", "content": "Hi."},
            user(chat_part(WIDE), "and twice", chat_part(WIDE)),
        ],
        [WIDE, WIDE],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_the_tokens_are_those_of_transformers(
    llm: LLM, made: tuple[ModelFolder, PreTrainedModel], name: str
) -> None:
    assert_as_transformers(llm, made, *CHATS[name])


def assert_as_transformers(
    llm: LLM,
    made: tuple[ModelFolder, PreTrainedModel],
    messages: list[dict[str, Any]],
    images: list[Image.Image],
) -> int:
    """Returns the number of cached tokens."""
    folder, model = made
    [output] = llm.chat(messages, GREEDY)
    prompt, pixels = reference_prompt(folder, messages, images)
    assert output.prompt_token_ids == prompt
    expected = reference_tokens(model, prompt, pixels, NUM_TOKENS)
    assert output.outputs[0].token_ids == expected
    return output.num_cached_tokens or 0


def test_an_equal_image_is_reused_and_another_one_is_not(
    llm: LLM, made: tuple[ModelFolder, PreTrainedModel]
) -> None:
    # Without the images, all these prompts have the same tokens.
    def ask(image: Image.Image) -> int:
        return assert_as_transformers(llm, made, [user("Now", chat_part(image), "?")], [image])

    first, other = make_image(11, 64, 64), make_image(12, 64, 64)
    num_before = ask(first)
    num_tokens = len(reference_prompt(made[0], [user("Now", chat_part(first), "?")], [first])[0])
    assert num_before < 16 < num_tokens  # nothing of an image
    assert ask(other) < 16
    for image in (first, other):
        assert ask(image) >= (num_tokens - 1) // 16 * 16
    # a copy of a partly equal block must not have rows of an image
    turned = first.copy()
    turned.paste(other.crop((32, 32, 64, 64)), (32, 32))
    assert ask(turned) < 16


def test_the_name_of_the_token_in_a_text_stands_for_no_image(
    llm: LLM, made: tuple[ModelFolder, PreTrainedModel]
) -> None:
    token_id = int(made[1].config.image_token_id)
    [output] = llm.chat([user("An <image>", chat_part(SMALL), "<image>")], GREEDY)
    prompt = output.prompt_token_ids
    rows, columns = 3, 2  # its longest side becomes 96 pixels
    assert prompt.count(token_id) == (rows * columns + 1) * RUN_LENGTH
    [plain] = llm.chat([user("An <image>")], GREEDY)
    assert token_id not in plain.prompt_token_ids


def test_several_completions_and_a_prompt_that_continues_after_the_image(
    llm: LLM, made: tuple[ModelFolder, PreTrainedModel]
) -> None:
    messages, images = CHATS["two"]
    drawn = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    [output] = llm.chat(messages, drawn)
    [again] = llm.chat(messages, drawn)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in again.outputs]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4
    longer = [*messages, {"role": "assistant", "content": "Yes."}, user(chat_part(WIDE), "More?")]
    assert assert_as_transformers(llm, made, longer, [*images, WIDE]) > 64


def test_preempted_prompts_with_images_are_computed_again(
    made: tuple[ModelFolder, PreTrainedModel],
) -> None:
    folder, model = made
    images = [make_image(20 + seed, 90, 90) for seed in range(4)]
    chats = [[user(f"{seed}", chat_part(image))] for seed, image in enumerate(images)]
    longer = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    small: dict[str, Any] = {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 37}
    with LLM(folder.path, **(SETTINGS | small)) as opened:
        outputs = opened.chat(chats, longer)
    for output, messages, image in zip(outputs, chats, images, strict=True):
        prompt, pixels = reference_prompt(folder, messages, [image])
        assert output.outputs[0].token_ids == reference_tokens(model, prompt, pixels, 40)


def header_of_a_large_png() -> bytes:
    """Returns a PNG that says that it has 100,000 x 100,000 pixels, and has none."""
    file = io.BytesIO()
    make_image(1, 4, 4).save(file, "png")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">2I", 100_000, 100_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


WHOLE = base64.b64decode(data_url(WIDE).partition(",")[2])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1/a.png", "URLs of other servers are not fetched"),
        ("file:///etc/passwd", "URLs of other servers are not fetched"),
        ("data:image/png,abc", "as a data: URL with base64"),
        ("data:image/png;base64,?", "base64 of an image is invalid"),
        (as_url(b""), "must be PNG, JPEG, WebP or GIF"),
        (as_url(WHOLE[:-200]), "cannot be decoded"),
        (as_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "must be PNG, JPEG, WebP or GIF"),
        (data_url(WIDE, "bmp"), "must be PNG, JPEG, WebP or GIF"),
        (as_url(header_of_a_large_png()), "pixels"),
    ],
)
def test_what_is_no_image_is_refused(llm: LLM, url: str, says: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(says)):
        llm.chat([user({"type": "image_url", "image_url": {"url": url}})], GREEDY)


def test_many_images_and_those_of_other_roles_are_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="17 images; they may have at most 16"):
        llm.chat([user(*[chat_part(SMALL)] * 17)], GREEDY)
    with pytest.raises(BadRequest, match="only messages of the role user may have images"):
        llm.chat([user("a"), user(chat_part(SMALL)) | {"role": "assistant"}, user("b")], GREEDY)
    short = SamplingParams(truncate_prompt_tokens=5)
    with pytest.raises(BadRequest, match="truncate_prompt_tokens cannot be used with images"):
        llm.chat([user(chat_part(SMALL))], short)


def test_a_text_model_says_that_it_takes_text_only(tmp_path: Path) -> None:
    folder = make_random_speaker(tmp_path)
    with (
        LLM(folder.path, **SETTINGS) as opened,
        pytest.raises(BadRequest, match="an image, but this model takes text only"),
    ):
        opened.chat([user(chat_part(SMALL))], GREEDY)


@pytest.mark.parametrize("form", ["jpeg", "webp", "gif"])
def test_each_format_has_the_tokens_of_transformers(
    llm: LLM, made: tuple[ModelFolder, PreTrainedModel], form: str
) -> None:
    file = io.BytesIO(base64.b64decode(data_url(WIDE, form).partition(",")[2]))
    decoded = Image.open(file).convert("RGB")
    assert_as_transformers(llm, made, [user(chat_part(WIDE, form))], [decoded])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("options", [{"do_image_splitting": False}, {"do_resize": False}])
def test_other_models_and_options(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    made = make_vision_model(tmp_path, kind, **options)
    with LLM(made[0].path, **SETTINGS) as opened:
        for messages, images in CHATS.values():
            assert_as_transformers(opened, made, messages, images)
