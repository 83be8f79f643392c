"""Computes the embeddings of images with the vision tower of a multimodal checkpoint, in the
modules of the transformers library."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from safetensors import safe_open

from tandem.common.config.engine import EngineConfig
from tandem.common.prompt_image import PromptImage
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.image_rows import Fetch, ImageRows
from tandem.errors import BadRequest, ConfigError
from tandem.models.files import few, read_json
from tandem.models.folder import ModelFolder
from tandem.models.images import ImageRules, open_image, read_rules

log = logging.getLogger(__name__)


def make_image_rows(
    folder: ModelFolder,
    runner: ModelRunner,
    config: EngineConfig,
    fetch: Fetch = lambda image, salt: None,
) -> ImageRows:
    """Returns what computes the embeddings of images for an engine, or refuses images. `fetch`
    requests an embedding from an encode worker."""
    rules = read_rules(folder)
    if not isinstance(rules, str):
        if config.tensor_parallel > 1:
            rules = "several ranks (tensor-parallel) compute no images"
        elif not runner.takes_embeddings:
            rules = "the Triton kernels compute no images; start the worker with --kernels torch"
    if isinstance(rules, str):
        return ImageRows(None, rules)
    return ImageRows(VisionTower(folder, rules, runner.device).encode, fetch=fetch)


class VisionTower:
    """The vision tower of a model, in fp32. Unless `load` is called, it is loaded when the first
    image comes, because most workers compute none: a decode worker only where the prompt is
    computed there. One thread at a time may use it."""

    def __init__(self, folder: ModelFolder, rules: ImageRules, device: torch.device) -> None:
        self._folder = folder
        self._rules = rules
        self._device = device
        self._loaded: tuple[Any, Any, Any] | None = None

    @torch.inference_mode()
    def encode(self, image: PromptImage) -> torch.Tensor:
        """Returns the embedding of an image, fp32 [rows, hidden] on the host. Raises BadRequest,
        ConfigError or UnsupportedModel."""
        if self._rules.digest_of(image.data) != image.digest:
            raise BadRequest(
                "the router and the worker process images in different ways; both must have the "
                "same files of the model",
                param="messages",
            )
        processor, tower, connector = self.load()
        pixels = processor([[open_image(image.data)]], return_tensors="pt")["pixel_values"]
        rows = []
        # One tile after the other, because a tower's activations of all tiles could be large.
        for tile in pixels[0].to(self._device, torch.float32).split(1):
            hidden = tower(pixel_values=tile).last_hidden_state
            rows.append(connector(hidden)[0].cpu())
        return torch.cat(rows)

    def load(self) -> tuple[Any, Any, Any]:
        """Returns the image processor, the tower and the connector of the tower to the text part,
        which the first call loads. Raises ConfigError if a tensor is missing or has another
        shape."""
        if self._loaded is None:
            self._loaded = self._read()
        return self._loaded

    def _read(self) -> tuple[Any, Any, Any]:
        # Imported here because importing transformers takes seconds.
        from transformers import AutoConfig
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3_pixels
        from transformers.models.idefics3 import modeling_idefics3 as idefics3
        from transformers.models.smolvlm import image_processing_pil_smolvlm as smolvlm_pixels
        from transformers.models.smolvlm import modeling_smolvlm as smolvlm

        started = time.perf_counter()
        automatic: Any = AutoConfig
        config = automatic.for_model(**read_json(self._folder.path / "config.json"))
        # The library's functions have no types, so mypy sees the classes as Any.
        make_processor: Any = smolvlm_pixels.SmolVLMImageProcessorPil
        make_tower: Any = smolvlm.SmolVLMVisionTransformer
        make_connector: Any = smolvlm.SmolVLMConnector
        if not self._rules.architecture.startswith("SmolVLM"):
            make_processor = idefics3_pixels.Idefics3ImageProcessorPil
            make_tower = idefics3.Idefics3VisionTransformer
            make_connector = idefics3.Idefics3Connector
        tower = make_tower._from_config(config.vision_config).float()
        connector = make_connector(config).float()
        self._fill(tower, "vision_model.")
        self._fill(connector, "connector.")
        processor = make_processor.from_dict(dict(self._rules.options))
        log.info("loaded the vision tower in %.1f s", time.perf_counter() - started)
        return processor, tower.to(self._device).eval(), connector.to(self._device).eval()

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        tensors = {}
        for file in self._folder.weight_files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    own = name.removeprefix("model.")
                    if own.startswith(prefix):
                        tensors[own.removeprefix(prefix)] = opened.get_tensor(name).float()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
        if wrong := [name for name, shape in wanted.items() if shapes.get(name) != shape]:
            raise ConfigError(
                f"images cannot be computed, because the checkpoint lacks tensors of its vision "
                f"tower, or they have other shapes: {few([prefix + name for name in wrong])}"
            )
        module.load_state_dict({name: tensors[name] for name in wanted})
