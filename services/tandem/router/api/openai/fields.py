"""Fields of the OpenAI API, and of vLLM's additions to it, that Tandem does not act on.

A client that sends one at its neutral value means nothing by it and is served. Any other value
asks for what Tandem would not do, so the request is refused with the field's name.
"""

from typing import Any

from tandem.errors import BadRequest

# Bookkeeping that has no effect on the answer.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "parallel_tool_calls",
    }
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
}


def strip_unused(body: dict[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """Returns the supported fields that are set (null means missing, as it does at OpenAI).

    Raises BadRequest naming the first field that is unknown, or that asks for what is not done.
    """
    kept = {}
    for name, value in body.items():
        if name in supported:
            if value is not None:
                kept[name] = value
        elif name in _NEUTRAL:
            if value is not None and not any(_same(value, n) for n in _NEUTRAL[name]):
                raise _unsupported(name)
        elif name not in IGNORED:
            allowed = ", ".join(sorted(supported))
            raise BadRequest(
                f"the field {name[:80]!r} is unknown; allowed are: {allowed}", param=name[:80]
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Returns whether the two are equal, without taking true for 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _unsupported(name: str) -> BadRequest:
    allowed = [_json(n) for n in _NEUTRAL[name]] + ["null"]
    return BadRequest(
        f"{name} is not supported; leave it out or send {' or '.join(allowed)}", param=name
    )


def _json(value: Any) -> str:
    return str(value).replace("'", '"').lower() if not isinstance(value, str) else f'"{value}"'
