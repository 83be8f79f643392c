"""What happens to each field of a request. Each API has a table, a `FieldPolicy`, beside the class
of its bodies.

  kind of field    what happens                                                  example in a chat
  acted on         the class of the body has it                                  `temperature`
  record           accepted with any value; does not concern the answer          `user`
  hint             accepted without effect, and named in the header `warning`    `verbosity`
  refused          would change what the answer means: an error                  `suffix`
  unknown          dropped, and named in the header; with `--strict-fields` an error

A hint or a refused field whose value asks for nothing, such as null, false, 0, "", [] or {}, is
accepted and not named. So are the values in the table, such as `"modalities": ["text"]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import BadRequest

WITHOUT_EFFECT = "fields without effect"  # text of the header `warning` for hints
UNKNOWN = "unknown fields of the request are ignored"
LEFT_OUT = "parts of the request are left out"

_Values = Mapping[str, tuple[Any, ...]]  # field name -> values that ask for nothing


def each(*names: str) -> dict[str, tuple[Any, ...]]:
    """Returns entries for fields without values of their own that ask for nothing."""
    return dict.fromkeys(names, ())


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """The fields of an API on which Tandem does not act."""

    records: frozenset[str] = frozenset()
    hints: _Values = field(default_factory=dict)
    refused: _Values = field(default_factory=dict)

    def hints_in(self, body: Mapping[str, Any]) -> list[str]:
        """Returns the names of the hints in a body whose values ask for something."""
        return [
            name
            for name, values in self.hints.items()
            if name in body and not _asks_nothing(body[name], values)
        ]

    def drop_unknown(self, body: dict[str, Any], supported: frozenset[str]) -> list[str]:
        """Removes from a body the fields that are neither in `supported` nor in the table. Returns
        the names of the removed fields."""
        known = supported | self.records | self.hints.keys() | self.refused.keys()
        unknown = [name for name in body if name not in known]
        for name in unknown:
            del body[name]
        return unknown

    def acted_on(self, body: Mapping[str, Any], supported: frozenset[str]) -> dict[str, Any]:
        """Returns the supported fields. Raises BadRequest, which names the field, for an unknown
        field and for a refused one."""
        kept = {}
        for name, value in body.items():
            if name in supported:
                kept[name] = value
            elif name in self.refused:
                values = self.refused[name]
                if not _asks_nothing(value, values):
                    allowed = " or ".join([*map(_json, values), "null"])
                    message = f"{name} is not supported; leave it out or send {allowed}"
                    raise BadRequest(message, param=name)
            elif name not in self.records and name not in self.hints:
                allowed = ", ".join(sorted(supported))
                raise BadRequest(
                    f"the field {name[:80]!r} is unknown; allowed are: {allowed}", param=name[:80]
                )
        return kept


# fields of OpenAI's chats and completions, and additions of vLLM and SGLang
_REFUSED = {
    "best_of": (1,),  # has an effect in completions only
    # has an effect in chats only; completions use `logprobs` for the number of likely tokens
    "top_logprobs": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    **each("suffix", "prompt_embeds", "functions", "tools", "audio", "chat_template", "documents"),
    **each("allowed_token_ids", "kv_transfer_params", "mm_processor_kwargs", "structural_tag"),
    **each("logits_processors", "custom_logit_processor", "vllm_xargs", "stop_regex", "lora_path"),
    **each("session_params", "return_hidden_states", "no_stop_trim"),
}
_HINTS = {
    "spaces_between_special_tokens": (True,),
    **each("verbosity", "prediction", "web_search_options", "moderation"),
    **each("prompt_cache_options"),
}
_RECORDS = frozenset(("user", "metadata", "store", "safety_identifier", "service_tier"))
CHAT_POLICY = FieldPolicy(_RECORDS, _HINTS, _REFUSED)
# A completion has no chat template, so the options of a template change nothing.
COMPLETION_POLICY = FieldPolicy(
    _RECORDS,
    {
        **_HINTS,
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "add_generation_prompt": (True,),
        **each("chat_template_kwargs", "reasoning_effort", "continue_final_message"),
    },
    _REFUSED,
)

# The header `warning` has at most _WARNED_MAX field names, each cut to
# _WARNED_CHARACTERS_MAX characters.
_WARNED_MAX = 8
_WARNED_CHARACTERS_MAX = 40
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


def warn(headers: dict[str, str], text: str, names: Sequence[str]) -> None:
    """Adds `text` and `names` to the header `warning` (RFC 7234). If `names` is empty, the header
    does not change."""
    names = list(dict.fromkeys(names))
    shown = [_NOT_PLAIN.sub("?", name)[:_WARNED_CHARACTERS_MAX] for name in names[:_WARNED_MAX]]
    if (num_more := len(names) - len(shown)) > 0:
        shown.append(f"and {num_more} more")
    if shown:
        value = f'299 tandem "{text}: {", ".join(shown)}"'
        headers["warning"] = ", ".join(filter(None, (headers.get("warning"), value)))


def _asks_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    return not value or any(_same(value, one) for one in values)


def _same(value: Any, neutral: Any) -> bool:
    """Compares two JSON values. In JSON, unlike in Python, true does not equal 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _json(value: Any) -> str:
    return str(value).replace("'", '"').lower() if not isinstance(value, str) else f'"{value}"'
