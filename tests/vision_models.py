"""A tiny SmolVLM or Idefics3 with random weights, images for it, and what transformers makes of
both."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tandem.api.openai.requests import parse_chat
from tandem.common.prompt_image import PromptImage
from tandem.models.folder import ModelFolder
from tandem.models.images import read_rules
from tandem.models.source import read_folder, resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.router.request.conversation import Conversation
from tandem.router.request.prompt.prompts import prepare_prompt, read_images, with_data

RUN_LENGTH = 4  # rows of a tile: 32 x 32 pixels in patches of 8 x 8, of which 2 x 2 are one row
_SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'] is string %}: {{ m['content'] }}{% else %}:{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %} {{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TEXT = {
    "model_type": "llama",
    "vocab_size": 49216,
    "hidden_size": 96,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
}


def make_vision_model(
    path: Path, kind: str = "smolvlm", **options: Any
) -> tuple[ModelFolder, PreTrainedModel]:
    """Writes a model folder as from the hub. Returns it and transformers' model, both in fp32.

    `options` are options of its image processor.
    """
    config_class, model_class, processor_class = _KINDS[kind]
    file = resolve("smollm2").path
    tokenizer = LibraryTokenizer.from_file(str(file / "tokenizer.json"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    torch.manual_seed(7)
    config = config_class(
        text_config=_TEXT,
        vision_config=_VISION,
        scale_factor=2,
        image_token_id=tokenizer.token_to_id("<image>"),
        tie_word_embeddings=False,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    model.save_pretrained(path)
    model.generation_config.eos_token_id = None  # no token ends what transformers generates
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    processor_class(**(sizes | options)).save_pretrained(path)
    return read_folder(path), model


def make_image(seed: int, width: int, height: int) -> Image.Image:
    """Returns an image of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def data_url(image: Image.Image, form: str = "png") -> str:
    """Returns an image as a data: URL."""
    file = io.BytesIO()
    image.save(file, form)
    return as_url(file.getvalue(), form)


def as_url(data: bytes, form: str = "png") -> str:
    """Returns the bytes of a file as a data: URL."""
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"


def chat_part(image: Image.Image, form: str = "png") -> dict[str, Any]:
    """Returns an image as a content part of OpenAI's chat API."""
    return {"type": "image_url", "image_url": {"url": data_url(image, form)}}


def own_prompt(
    folder: ModelFolder, messages: Sequence[dict[str, Any]]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Returns the token ids and the images of a chat, as a router makes them."""
    request = parse_chat({"model": "", "messages": list(messages)}, "a").requests[0]
    images = read_images(request, read_rules(folder))
    assert isinstance(request.prompt, Conversation)
    prepared = prepare_prompt(Tokenizer.of(folder), request.prompt, None, None, images=images)
    return prepared.token_ids, with_data(prepared, images).images


def reference_prompt(
    folder: ModelFolder, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image]
) -> tuple[list[int], Any]:
    """Returns the token ids and the pixels of a chat, as transformers' processors make them."""
    import jinja2

    settings = json.loads((folder.path / "tokenizer_config.json").read_text())
    shown = [
        message
        | {
            "content": [
                {"type": "image"} if part["type"] == "image_url" else part
                for part in message["content"]
            ]
        }
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    template = jinja2.Template(settings["chat_template"])
    text = template.render(messages=shown, add_generation_prompt=True)
    name = json.loads((folder.path / "config.json").read_text())["model_type"]
    processor = _KINDS[name][2].from_pretrained(folder.path)
    pixels = processor([list(images)], return_tensors="pt", return_row_col_info=True)
    first, *rest = text.split("<image>")
    for row, column, after in zip(pixels["rows"][0], pixels["cols"][0], rest, strict=True):
        own = get_image_prompt_string(
            row,
            column,
            RUN_LENGTH,
            fake_token_around_image="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )
        first += own + after
    tokenizer = LibraryTokenizer.from_file(str(folder.path / "tokenizer.json"))
    return tokenizer.encode(first, add_special_tokens=False).ids, pixels


def reference_tokens(
    model: PreTrainedModel, token_ids: Sequence[int], pixels: Any, num_tokens: int
) -> list[int]:
    """Returns the tokens that transformers generates greedily after a prompt."""
    prompt = torch.tensor([list(token_ids)])
    generate: Any = model.generate
    generated = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        pixel_values=pixels["pixel_values"],
        pixel_attention_mask=pixels["pixel_attention_mask"],
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    tokens: list[int] = generated[0, len(token_ids) :].tolist()
    return tokens
