"""Fields of the OpenAI API, and of vLLM's additions to it, that Tandem does not act on.

A client that sends one at its neutral value means nothing by it and is served. Any other value
asks for what Tandem would not do, so the request is refused with the field's name.
"""

from typing import Any

from tandem.errors import BadRequest

# Bookkeeping that has no effect on the answer.
_HINTS = ("prompt_cache_key", "prompt_cache_retention", "service_tier", "parallel_tool_calls")
IGNORED = frozenset((*_HINTS, "user", "metadata", "store", "safety_identifier"))

_GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)),
    "priority": (0,),
    "top_logprobs": (0,),  # of a completion, whose `logprobs` is a number
    "echo": (False,),  # of a chat
    **dict.fromkeys(("use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "chat_template_kwargs": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    # Any value but null asks for something.
    **dict.fromkeys(("audio", "prediction", "verbosity", "moderation"), ()),
    **dict.fromkeys(("web_search_options", "add_special_tokens", "chat_template", *_GUIDES), ()),
    **dict.fromkeys(("allowed_token_ids", "cache_salt"), ()),
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
                allowed = " or ".join([*map(_json, _NEUTRAL[name]), "null"])
                message = f"{name} is not supported; leave it out or send {allowed}"
                raise BadRequest(message, param=name)
        elif name not in IGNORED:
            allowed = ", ".join(sorted(supported))
            raise BadRequest(
                f"the field {name[:80]!r} is unknown; allowed are: {allowed}", param=name[:80]
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Returns whether the two are equal, without taking true for 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _json(value: Any) -> str:
    return str(value).replace("'", '"').lower() if not isinstance(value, str) else f'"{value}"'
