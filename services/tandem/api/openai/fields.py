"""Fields of an API that Tandem does not act on: here those of OpenAI's completions and chats, and
of vLLM's and SGLang's additions.

A client that sends one at its neutral value means nothing by it and is served. Any other value
asks for what Tandem would not do, so the request is refused with the field's name. A field that
nobody here knows is dropped, and the answer's header `warning` names it: clients send their own
notes and the fields of other servers. `--strict-fields` refuses it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import BadRequest

# Bookkeeping that has no effect on the answer.
_HINTS = ("service_tier", "parallel_tool_calls")
IGNORED = frozenset((*_HINTS, "user", "metadata", "store", "safety_identifier"))

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),  # of a chat
    "priority": (0,),
    "top_logprobs": (0,),  # of a completion, whose `logprobs` is a number
    "continue_final_message": (False,),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "chat_template_kwargs": ({},),
    "suffix": ("",),
    "prompt_embeds": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    # Any value but null asks for something.
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
    """The fields of an API's bodies that have no effect, and those that are refused but for their
    neutral values."""

    ignored: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


CHAT_FIELDS = UnusedFields(IGNORED, _NEUTRAL)

# The header is short, whatever a client sends: so many names, of so many characters.
_WARNED_MAX = 8
_WARNED_CHARACTERS_MAX = 40
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


def drop_unknown(
    body: dict[str, Any], supported: frozenset[str], unused: UnusedFields = CHAT_FIELDS
) -> list[str]:
    """Takes the fields that are not known out of a body. Returns their names."""
    known = supported | unused.neutral.keys() | unused.ignored
    unknown = [name for name in body if name not in known]
    for name in unknown:
        del body[name]
    return unknown


def warn(headers: dict[str, str], text: str, names: Sequence[str]) -> None:
    """Adds these names to the header `warning`: a warn-code, an agent and a text (RFC 7234). No
    names are no warning."""
    shown = [_NOT_PLAIN.sub("?", name)[:_WARNED_CHARACTERS_MAX] for name in names[:_WARNED_MAX]]
    if (num_more := len(names) - len(shown)) > 0:
        shown.append(f"and {num_more} more")
    if shown:
        value = f'299 tandem "{text}: {", ".join(shown)}"'
        headers["warning"] = ", ".join(filter(None, (headers.get("warning"), value)))


def strip_unused(
    body: dict[str, Any], supported: frozenset[str], unused: UnusedFields = CHAT_FIELDS
) -> dict[str, Any]:
    """Returns the supported fields that are set (null means missing, as it does at OpenAI).

    Raises BadRequest naming the first field that is unknown, or that asks for what is not done.
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
    """Returns whether the two are equal, without taking true for 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _json(value: Any) -> str:
    return str(value).replace("'", '"').lower() if not isinstance(value, str) else f'"{value}"'
