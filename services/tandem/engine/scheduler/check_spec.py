"""Checks the spec of a sequence before the sequence enters an engine: the ranges of its values, the
model's context and the size of the KV pools."""

from collections.abc import Callable

from tandem.common.adapter import Adapter
from tandem.common.kv_budget import KvBudget, check_budget
from tandem.common.prompt_image import PromptImage
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.heavy_hitters import least_tokens
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import BadRequest, ContextTooLong, NeverFits

# Largest allowed bias, penalty or temperature. It is far above any logit, and a logit changed by it
# stays finite in fp32.
_EDIT_MAX = 1e6
_REPETITION_PENALTY_MIN = 1e-6  # a logit divided by this value stays finite
# Smallest and largest allowed value of each sampling parameter.
_RANGES = {
    "temperature": (0.0, _EDIT_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-_EDIT_MAX, _EDIT_MAX),
    "frequency_penalty": (-_EDIT_MAX, _EDIT_MAX),
    "repetition_penalty": (_REPETITION_PENALTY_MIN, _EDIT_MAX),
}


def check_spec(
    spec: SequenceSpec,
    *,
    layout: KvLayout,
    max_model_len: int,
    vocab_size: int,
    check_adapter: Callable[[Adapter | None], None],
    check_images: Callable[[tuple[PromptImage, ...], int], None],
    why_no_budgets: str = "",
) -> None:
    """Raises BadRequest, ContextTooLong or NeverFits if the engine cannot run the sequence. The
    message has the allowed values. Errors of `check_adapter` and `check_images`, such as
    AdapterUnavailable, propagate. If the engine allows no KV budgets, `why_no_budgets` has the
    reason."""
    num_tokens = len(spec.token_ids)
    if not 1 <= spec.num_prompt_tokens <= num_tokens:
        raise BadRequest(
            f"num_prompt_tokens is {spec.num_prompt_tokens}; it must be from 1 to {num_tokens}, "
            "the number of sent tokens",
            param="prompt",
        )
    if min(spec.token_ids) < 0 or max(spec.token_ids) >= vocab_size:
        # A prompt of text can have unknown ids too, if the tokenizer has tokens for which the model
        # has no embedding.
        raise BadRequest(
            f"the token ids of the prompt are from {min(spec.token_ids)} to "
            f"{max(spec.token_ids)}; the model's token ids are from 0 to {vocab_size - 1}",
            param="prompt",
        )
    max_tokens = spec.sampling.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest(f"max_tokens is {max_tokens}; it must be at least 1", param="max_tokens")
    if num_tokens > max_model_len - 1 and num_tokens == spec.num_prompt_tokens:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens; the context is {max_model_len} tokens, so a "
            f"prompt may have at most {max_model_len - 1}",
            param="prompt",
        )
    if num_tokens > max_model_len:
        raise ContextTooLong(
            f"the sequence has {num_tokens} tokens; it may have at most {max_model_len}, the size "
            "of the context"
        )
    _check_numbers(spec.sampling)
    _check_edits(spec, vocab_size)
    check_adapter(spec.adapter)
    check_images(spec.images, spec.num_prompt_tokens)
    if spec.kv_budget is not None:
        _check_budget(spec.kv_budget, layout, why_no_budgets)
        if not spec.kv_budget.keeps_hitters:
            layout = layout.under(spec.kv_budget)
    _check_pool(spec, layout, max_model_len)


def _check_numbers(sampling: SamplingParams) -> None:
    """Raises BadRequest for values that could make a logit NaN or infinite."""
    for name, (least, largest) in _RANGES.items():
        _check_number(name, getattr(sampling, name), least, largest)
    for bias in (sampling.logit_bias or {}).values():
        _check_number("logit_bias", bias, -_EDIT_MAX, _EDIT_MAX)


def _check_number(name: str, value: float, least: float, largest: float) -> None:
    # NaN is refused too, because each comparison with NaN is false.
    if not least <= value <= largest:
        raise BadRequest(
            f"{name} is {value:g}; it must be from {least:g} to {largest:g}", param=name
        )


def _check_edits(spec: SequenceSpec, vocab_size: int) -> None:
    sampling = spec.sampling
    bad_words = [token_id for word in sampling.bad_words_token_ids for token_id in word]
    named = {"logit_bias": list(sampling.logit_bias or {}), "bad_words": bad_words}
    for name, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise BadRequest(
                f"{name} has token ids from {min(token_ids)} to {max(token_ids)}; the model's "
                f"token ids are from 0 to {vocab_size - 1}",
                param=name,
            )


def _check_budget(budget: KvBudget, layout: KvLayout, why_no_budgets: str) -> None:
    if all(group.window is not None for group in layout.groups):
        why_no_budgets = "all layers of the model already have a sliding window"
    if why_no_budgets:
        raise BadRequest(f"kv_budget is not supported: {why_no_budgets}", param="kv_budget")
    check_budget(budget)
    if not budget.keeps_hitters:
        return
    if layout.has_windows:
        raise BadRequest(
            f"kv_budget with the policy {budget.policy} is not supported: some layers of the model "
            "have a sliding window",
            param="kv_budget",
        )
    least = least_tokens(budget.sinks, layout.block_size)
    if budget.tokens < least:
        raise BadRequest(
            f"kv_budget has {budget.tokens} tokens, but the policy {budget.policy} with "
            f"{budget.sinks} sinks needs at least {least} tokens (KV blocks have "
            f"{layout.block_size} tokens)",
            param="kv_budget",
        )


def _check_pool(spec: SequenceSpec, layout: KvLayout, max_model_len: int) -> None:
    capacity = layout.tokens_max
    if capacity is None:
        return
    size = layout.block_size
    kept = spec.kv_budget.tokens if spec.kv_budget and spec.kv_budget.keeps_hitters else None
    if kept is not None and kept <= capacity:
        return
    pool = f"{capacity} tokens ({capacity // size} blocks of {size})"
    if spec.mode is Mode.PREFILL_ONLY:
        if len(spec.token_ids) > capacity:
            raise NeverFits(
                f"the prompt has {len(spec.token_ids)} tokens, but the KV pool holds only {pool}; "
                "send a shorter prompt",
                param="prompt",
            )
        return
    max_tokens = spec.sampling.max_tokens or max_model_len
    num_tokens = min(spec.num_prompt_tokens + max_tokens, max_model_len)
    if num_tokens > capacity:
        raise NeverFits(
            f"a prompt of {spec.num_prompt_tokens} tokens with max_tokens {max_tokens} can grow "
            f"to {num_tokens} tokens, but the KV pool holds only {pool}; send a shorter prompt "
            "or a lower max_tokens",
            param="max_tokens" if spec.num_prompt_tokens < capacity else "prompt",
        )
