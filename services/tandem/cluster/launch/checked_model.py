"""The model that this machine serves: found, and checked before processes start that read it.

The checks read the tokenizer and the headers of files, but no tensors.
"""

from collections.abc import Callable
from pathlib import Path

from tandem.cluster.launch.built_in_model import download_built_in
from tandem.cluster.launch.options import LaunchOptions
from tandem.errors import TandemError
from tandem.models.checkpoint.check import check_weights
from tandem.models.checkpoint.kv_scales import find_kv_scales
from tandem.models.folder import ModelFolder
from tandem.models.limits import check_settings
from tandem.models.lora.adapter import open_lora
from tandem.models.source import BUILT_IN, built_in_file, is_local, resolve
from tandem.models.tokenizer.check import check_file
from tandem.models.tokenizer.tokenizer import Tokenizer


def model_here(options: LaunchOptions) -> ModelFolder | None:
    """Returns the model if it is on this machine; None if it may have to be downloaded.

    Raises ConfigError naming the file, the adapter or the setting that workers could not serve.
    """
    if _needs_download(options.model) or not is_local(options.model):
        return None
    return _checked(options)


def fetch_model(options: LaunchOptions, say: Callable[[str], None]) -> ModelFolder:
    """Returns the model, and downloads it first if needed. Raises ConfigError as `model_here`."""
    say("looking for the model")
    if _needs_download(options.model):
        say("downloading the built-in model (93 MB, once)")
        download_built_in()
    return _checked(options)


def _checked(options: LaunchOptions) -> ModelFolder:
    model = resolve(options.model, revision=options.model_revision)
    check_settings(options.engine, model.config)
    check_weights(model.weight_files, model.config)
    if options.engine.kv_dtype == "fp8_e4m3":
        find_kv_scales(model.weight_files, model.config)
    Tokenizer.of(model)
    check_file(model.path / "tokenizer.json")
    for name, path in options.engine.lora.items():
        if options.listen and not Path(path).expanduser().exists():
            continue  # workers on other machines may have it
        try:
            open_lora(path, model.config, rank_max=options.engine.max_lora_rank)
        except TandemError as error:
            raise type(error)(f"--lora {name}: {error.message}") from error
    return model


def _needs_download(model: str) -> bool:
    return model == BUILT_IN and not Path(model).exists() and built_in_file() is None
