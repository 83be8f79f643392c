"""Finds and checks the draft model of speculative decoding: a smaller model with the same
vocabulary that proposes the next tokens. Reads configs and tokenizers, but no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tandem.common.config.engine import EngineOptions
from tandem.common.speculation import parse_speculation
from tandem.errors import ConfigError, TandemError
from tandem.models.files import naming, read_json
from tandem.models.folder import ModelFolder
from tandem.models.limits import check_settings
from tandem.models.source import resolve

AnyOptions = TypeVar("AnyOptions", bound=EngineOptions)


def find_draft(options: EngineOptions, model: ModelFolder) -> ModelFolder | None:
    """Returns the draft model that --speculative-config names for `model`; None if it names none.
    Downloads or converts the draft model if the cache does not have it.

    Raises ConfigError if there is no such model, or if it cannot propose tokens for `model`.
    """
    setting = parse_speculation(options.speculative_config)
    if setting is None or not setting.model:
        return None
    try:
        draft = resolve(setting.model, revision=setting.revision)
        check_settings(draft_options(options), draft.config)
    except TandemError as error:
        raise ConfigError(f"the draft model of speculative-config: {error.message}") from error
    if why := _why_not(model, draft):
        raise ConfigError(
            f"speculative-config has the draft model {setting.model}, but {why}; name another "
            "draft model, or set speculative-config to auto or off"
        )
    return draft


def draft_options(options: AnyOptions) -> AnyOptions:
    """Returns the options with which a worker with `options` computes its draft model: in one
    process, with the fastest kernels, with KV in the type of the computation, without adapters and
    without tiers."""
    return replace(
        options,
        kernels="auto",
        kv_dtype="auto",
        state_dtype="float32",
        numerics="fast",
        max_model_len=None,
        speculative_config="off",
        lora={},
        max_loras=0,
        tensor_parallel=1,
        expert_parallel=False,
        ranks_share_gpu=False,
        ranks_own_pools=False,
        kv_host_bytes=0,
        kv_disk_path="",
        kv_store_url="",
    )


def _why_not(model: ModelFolder, draft: ModelFolder) -> str:
    """Returns why a draft model cannot propose tokens for a model; "" if it can."""
    if draft.config.shared_kv is not None:
        return "it has compressed attention, whose KV cannot drop a rejected token"
    if draft.config.vocab_size != model.config.vocab_size:
        return (
            f"its vocab_size is {draft.config.vocab_size}; it must be that of the model, "
            f"{model.config.vocab_size}"
        )
    own, other = (each.path / "tokenizer.json" for each in (draft, model))
    if own.read_bytes() == other.read_bytes():
        return ""
    own_tokens, other_tokens = _tokens(own), _tokens(other)
    for token_id in range(model.config.vocab_size):
        one, two = own_tokens.get(token_id), other_tokens.get(token_id)
        if one != two:
            return (
                f"its vocabulary is another one: token {token_id} is {one!r}, and {two!r} in the "
                "model"
            )
    return ""


def _tokens(file: Path) -> dict[int, str]:
    """Returns the token of each id in a tokenizer.json, without added tokens: models of one family
    often differ in these, and a wrong proposal does no harm."""
    with naming(file):
        vocabulary = read_json(file)["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return {token_id: token for token, token_id in vocabulary.items()}
        return {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
