"""Request fields that have no effect in Tandem, and unknown request fields.

  field                                              what happens
  no effect on the text or the reply, such as        accepted with any value
  `user`
  asks for something that Tandem cannot do, such     accepted only with a neutral value, which asks
  as `suffix`                                        for nothing, such as ""; otherwise an error
  unknown                                            dropped, and named in the response header
                                                     `warning`; with `--strict-fields` an error

The first two rows are fields of OpenAI's completions and chats, and additions of vLLM and SGLang.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import BadRequest

# fields that change neither the generated text nor the reply
_HINTS = ("service_tier", "parallel_tool_calls")
IGNORED = frozenset((*_HINTS, "user", "metadata", "store", "safety_identifier"))

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),  # has an effect in completions only
    "priority": (0,),
    # has an effect in chats only; completions use `logprobs` for the number of likely tokens
    "top_logprobs": (0,),
    "continue_final_message": (False,),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "chat_template_kwargs": ({},),
    "suffix": ("",),
    "prompt_embeds": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    # An empty tuple: only null is neutral.
    **dict.fromkeys(("audio", "prediction", "verbosity", "moderation"), ()),
    **dict.fromkeys(("web_search_options", "chat_template"), ()),
    **dict.fromkeys(("allowed_token_ids", "cache_salt"), ()),
    "kv_transfer_params": (),
    **dict.fromkeys(("documents", "mm_processor_kwargs", "structural_tag"), ()),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "vllm_xargs"), ()),
    **dict.fromkeys(("stop_regex", "lora_path", "session_params"), ()),
    **dict.fromkeys(("return_hidden_states", "no_stop_trim"), (False,)),
}


@dataclass(frozen=True, slots=True)
class UnusedFields:
    """The fields that an API accepts although they have no effect. A field in `ignored` may have
    any value. A field in `neutral` may only be null or have one of the listed values."""

    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


CHAT_FIELDS = UnusedFields(IGNORED, _NEUTRAL)

# The header `warning` has at most _WARNED_MAX field names, each cut to
# _WARNED_CHARACTERS_MAX characters.
_WARNED_MAX = 8
_WARNED_CHARACTERS_MAX = 40
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


def drop_unknown(
    body: dict[str, Any], supported: frozenset[str], unused: UnusedFields = CHAT_FIELDS
) -> list[str]:
    """Removes from a body the fields that are neither in `supported` nor in `unused`. Returns the
    names of the removed fields."""
    known = supported | unused.neutral.keys() | unused.ignored
    unknown = [name for name in body if name not in known]
    for name in unknown:
        del body[name]
    return unknown


def warn(headers: dict[str, str], text: str, names: Sequence[str]) -> None:
    """Adds `text` and `names` to the header `warning` (RFC 7234). If `names` is empty, the header
    does not change."""
    shown = [_NOT_PLAIN.sub("?", name)[:_WARNED_CHARACTERS_MAX] for name in names[:_WARNED_MAX]]
    if (num_more := len(names) - len(shown)) > 0:
        shown.append(f"and {num_more} more")
    if shown:
        value = f'299 tandem "{text}: {", ".join(shown)}"'
        headers["warning"] = ", ".join(filter(None, (headers.get("warning"), value)))


def strip_unused(
    body: dict[str, Any], supported: frozenset[str], unused: UnusedFields = CHAT_FIELDS
) -> dict[str, Any]:
    """Returns the supported fields that are not null. Null means absent, as in OpenAI's API.

    Raises BadRequest for an unknown field, and for a field without effect whose value is not
    neutral. The error names the field.
    """
    kept = {}
    for name, value in body.items():
        if name in supported:
            if value is not None:
                kept[name] = value
        elif name in unused.neutral:
            neutral = unused.neutral[name]
            if value is not None and not any(_same(value, n) for n in neutral):
                allowed = " or ".join([*map(_json, neutral), "null"])
                message = f"{name} is not supported; leave it out or send {allowed}"
                raise BadRequest(message, param=name)
        elif name not in unused.ignored:
            allowed = ", ".join(sorted(supported))
            raise BadRequest(
                f"the field {name[:80]!r} is unknown; allowed are: {allowed}", param=name[:80]
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Compares two JSON values. In JSON, unlike in Python, true does not equal 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _json(value: Any) -> str:
    return str(value).replace("'", '"').lower() if not isinstance(value, str) else f'"{value}"'
