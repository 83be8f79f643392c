"""Images in prompts: reads them, and finds how many tokens they have and which.

SmolVLM and Idefics3 resize an image and cut it into square tiles. The vision tower computes an
embedding of `run_length` rows for each tile, and for the whole image. In the prompt, special tokens
say where each tile was:

    <fake_token_around_image><row_1_col_1><image>...<image>   the first tile
    ...
    <fake_token_around_image><global-img><image>...<image><fake_token_around_image>   the whole

The rows take the place of the tokens `<image>`. This module needs no tensor library. It computes
the same sizes as the library's image processor, which the vision tower uses
(engine/executor/vision_tower.py). Images are untrusted: sizes are read and checked before anything
is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.common.printable import shorten
from tandem.common.prompt_image import DIGEST_BYTES, PromptImage
from tandem.errors import BadRequest
from tandem.models.checkpoint.headers import read_header
from tandem.models.files import read_json, read_json_if_any
from tandem.models.folder import ModelFolder

if TYPE_CHECKING:
    from PIL import Image

    from tandem.models.tokenizer.tokenizer import Tokenizer

EXTRA = "tandem-llm[vision]"
ARCHITECTURES = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
PIXELS_MAX = 1 << 24  # of one image, such as 4,096 x 4,096
IMAGES_MAX = 16  # of one request
IMAGE_TOKEN = "<image>"
_FAKE_TOKEN, _WHOLE_TOKEN = "<fake_token_around_image>", "<global-img>"
_SIDE_MAX = 4096  # The library never resizes an image to a longer side.
_VERSION = b"tandem.image.v1"
_DATA_URL = re.compile(r"data:[a-z0-9.+/-]*(?:;[a-z0-9=-]+)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a model processes images."""

    architecture: str
    options: Mapping[str, Any]  # of the library's image processor
    longest_side: int | None  # an image is first resized to this longest side; None: it is not
    tile_side: int  # in pixels
    has_tiles: bool  # False: an image has no tiles, only the whole
    run_length: int  # number of rows of a tile's embedding
    token_id: int  # of `<image>`

    def digest_of(self, data: bytes) -> bytes:
        """Returns the digest of an image's file and of the options by which it is processed."""
        options = json.dumps([self.architecture, self.options], sort_keys=True).encode()
        key = blake2b(options, digest_size=32, key=_VERSION).digest()
        return blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()

    def tiles_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns the numbers of rows and columns of tiles of an image with these sizes in pixels;
        (0, 0) if it has only the whole."""
        if not self.has_tiles:
            return 0, 0
        if self.longest_side is not None:
            width, height = _scaled(width, height, self.longest_side, is_even=True)
            if max(width, height) > _SIDE_MAX:
                width, height = _scaled(width, height, _SIDE_MAX)
        side = self.tile_side
        long = ceil(max(width, height) / side) * side
        width, height = _scaled(width, height, long)
        rows, columns = ceil(height / side), ceil(width / side)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def text_of(self, width: int, height: int) -> str:
        """Returns the text that stands for an image in the prompt."""
        run = IMAGE_TOKEN * self.run_length
        rows, columns = self.tiles_of(width, height)
        tiles = "".join(
            "".join(f"{_FAKE_TOKEN}<row_{row}_col_{column}>{run}" for column in _from_one(columns))
            + "\n"
            for row in _from_one(rows)
        )
        return f"{tiles}{tiles and chr(10)}{_FAKE_TOKEN}{_WHOLE_TOKEN}{run}{_FAKE_TOKEN}"


class ReadImage(NamedTuple):
    """An image that was read and checked."""

    digest: bytes
    data: bytes  # its file
    text: str  # stands for it in the prompt


def _from_one(number: int) -> range:
    return range(1, number + 1)


def _scaled(width: int, height: int, longest: int, *, is_even: bool = False) -> tuple[int, int]:
    """Returns the sizes of an image whose longest side is resized to `longest`. With `is_even`, the
    other side is rounded up to an even number."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += is_even and height % 2
    else:
        width, height = int(longest * ratio), longest
        width += is_even and width % 2
    return max(width, 1), max(height, 1)


def read_rules(folder: ModelFolder) -> ImageRules | str:
    """Returns how a model processes images. If it takes none, returns why."""
    if folder.is_gguf or not folder.config.is_text_part:
        return "this model takes text only"
    config = read_json(folder.path / "config.json")
    architecture = config["architectures"][0]
    if architecture not in ARCHITECTURES:
        return (
            f"{architecture} is served as its text part, so this model takes text only; images are "
            f"supported for {' and '.join(ARCHITECTURES)}"
        )
    if missing := [name for name in ("PIL", "transformers") if find_spec(name) is None]:
        return f"images need {' and '.join(missing)}, which are not installed; install {EXTRA}"
    processor = read_json_if_any(folder.path / "processor_config.json")
    options = read_json_if_any(folder.path / "preprocessor_config.json")
    options = options or processor.get("image_processor") or {}
    vision = config.get("vision_config") or {}
    numbers: dict[str, Any] = {
        "image_token_id": config.get("image_token_id"),
        "vision_config.patch_size": vision.get("patch_size"),
        "scale_factor": config.get("scale_factor", 2),
        "max_image_size.longest_edge": _longest_edge(options.get("max_image_size"), 364),
        "size.longest_edge": _longest_edge(options.get("size"), 4 * 364),
    }
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            return f"images are not supported for this model: {name} is {value!r:.40}"
    token_id, patch, factor, tile_side, longest = numbers.values()
    num_patches = tile_side // patch
    if num_patches == 0 or num_patches % factor:
        return (
            f"images are not supported for this model: a tile's side has {num_patches} patches, "
            f"which is no multiple of scale_factor {factor}"
        )
    return ImageRules(
        architecture,
        options,
        longest_side=longest if options.get("do_resize", True) else None,
        tile_side=tile_side,
        has_tiles=bool(options.get("do_image_splitting", True)),
        run_length=(num_patches // factor) ** 2,
        token_id=token_id,
    )


def is_of_tower(name: str) -> bool:
    """Returns whether a tensor of a checkpoint belongs to its vision tower, or to the connector of
    the tower to the text part."""
    return name.removeprefix("model.").startswith(("vision_model.", "connector."))


def tower_bytes(folder: ModelFolder) -> int:
    """Returns the memory of a model's vision tower, in fp32; 0 if the model takes no images."""
    if isinstance(read_rules(folder), str):
        return 0
    tensors = [read_header(file).tensors for file in folder.weight_files]
    sizes = (prod(t.shape) for file in tensors for name, t in file.items() if is_of_tower(name))
    return 4 * sum(sizes)


def _longest_edge(sizes: object, default: int) -> object:
    if sizes is None:
        return default
    return sizes.get("longest_edge") if isinstance(sizes, dict) else sizes


def read_data_url(url: str) -> bytes:
    """Returns the bytes in a data: URL. Raises BadRequest for other URLs."""
    found = _DATA_URL.match(url)
    if found is None:
        raise BadRequest(
            "an image must be sent as a data: URL with base64, such as "
            f"data:image/png;base64,iVBOR...; URLs of other servers are not fetched: "
            f"{shorten(url)}",
            param="messages",
        )
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the base64 of an image is invalid: {error}", param="messages") from None


def read_image(url: str, rules: ImageRules) -> ReadImage:
    """Reads the image in a data: URL and decodes it once, to be sure that it can be. Raises
    BadRequest."""
    data = read_data_url(url)
    width, height = open_image(data).size
    return ReadImage(rules.digest_of(data), data, rules.text_of(width, height))


def open_image(data: bytes) -> Image.Image:
    """Decodes an image, of which an animation has the first frame only, and turns it as its EXIF
    data say. Raises BadRequest if it is too large, or no image of an allowed format."""
    # Imported here because Pillow is optional.
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > PIXELS_MAX:
                raise BadRequest(
                    f"an image has {width} x {height} pixels; it must have at most {PIXELS_MAX} "
                    "pixels",
                    param="messages",
                )
            return ImageOps.exif_transpose(opened).convert("RGB")
    except BadRequest:
        raise
    except Exception as error:  # Pillow raises many kinds of errors for files that are no images.
        reason = " ".join(str(error).split())
        raise BadRequest(
            f"an image cannot be decoded; it must be PNG, JPEG, WebP or GIF ({reason:.120})",
            param="messages",
        ) from None


def with_images(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    images: Sequence[ReadImage],
    rules: ImageRules,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Puts the tokens of each image in place of its token `<image>`, which the chat template has
    written. Returns the token ids, and the images without their data.

    Raises BadRequest if the template has not written one `<image>` for each image.
    """
    places = [at for at, token_id in enumerate(token_ids) if token_id == rules.token_id]
    if len(places) != len(images):
        raise BadRequest(
            f"the model's chat template has places for {len(places)} images in these messages, but "
            f"they have {len(images)} images",
            param="messages",
        )
    expanded: list[int] = []
    found = []
    last = 0
    for place, image in zip(places, images, strict=True):
        expanded += token_ids[last:place]
        last = place + 1
        own = tokenizer.encode(image.text, add_special_tokens=False)
        tokens = [at for at, token_id in enumerate(own) if token_id == rules.token_id]
        starts = [len(expanded) + at for at in tokens[:: rules.run_length]]
        found.append(PromptImage(image.digest, b"", starts, rules.run_length))
        expanded += own
    return [*expanded, *token_ids[last:]], tuple(found)
