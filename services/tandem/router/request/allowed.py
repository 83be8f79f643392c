"""The allowed values and bounds of request fields, in the words of the error messages."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.common import sampling_params
from tandem.common.kv_budget import BUDGET_TOKENS_MAX, SINKS_DEFAULT
from tandem.common.retention import PRIORITY_MAX as KV_PRIORITY_MAX
from tandem.common.retention import PRIORITY_MIN as KV_PRIORITY_MIN
from tandem.common.sampling_params import CHOICES_MAX, refusal_of
from tandem.errors import BadRequest
from tandem.net.security.limits import PRIORITY_MIN

KEY_CHARACTERS_MAX = 1024
LENGTH_PENALTY_MAX = 10.0
TOOLS_MAX = 1024

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

ALLOWED = {
    **sampling_params.ALLOWED,
    "model": "the name of the served model",
    "prompt": "a non-empty string, or one list of token ids",
    "messages": "a non-empty list of messages, each with a role (system, user, assistant, tool, "
    "or another that the chat template knows: up to 64 letters, digits, _ and -) "
    'and a content that is a string or a list of parts: {"type": "text", "text": ...} and, of a '
    'user, {"type": "image_url", "image_url": {"url": "data:..."}}',
    "tools": f'a list of at most {TOOLS_MAX} tools such as {{"type": "function", "function": '
    '{"name": ..., "parameters": ...}}',
    "tool_choice": '"auto" or "none"; or, if the request has tools, "required" or one of the '
    'tools, such as {"type": "function", "function": {"name": ...}}, or several of them, such as '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
    "function": "the name of one of the tools, and only with tool_choice=required",
    "parallel_tool_calls": "true or false",
    "reasoning_effort": f"one of {', '.join(REASONING_EFFORTS)}",
    "chat_template_kwargs": "an object with variables of the model's chat template",
    "best_of": (
        f"an integer from n to {CHOICES_MAX}, and at most {CHOICES_MAX} for all prompts "
        "together; it must equal n with stream=true, with use_beam_search and in a chat"
    ),
    "use_beam_search": "true or false; it cannot be true with stream=true",
    "length_penalty": (
        f"a number from {-LENGTH_PENALTY_MAX:g} to {LENGTH_PENALTY_MAX:g}, and without "
        "use_beam_search only 1"
    ),
    "kv_budget": 'an object such as {"policy": "sinks_window", "tokens": 1024, "sinks": 4}, with '
    f"the policy sinks_window or heavy_hitters, tokens from 1 to {BUDGET_TOKENS_MAX} and sinks "
    f"from 0 to tokens - 1 (by default {SINKS_DEFAULT})",
    "echo": "true or false",
    "return_tokens_as_token_ids": "true or false",
    "max_completion_tokens": "an integer of at least 1",
    "prompt_cache_retention": "in_memory or 24h",
    "prompt_cache_key": f"a string of at most {KEY_CHARACTERS_MAX} characters",
    "cache_salt": f"a string of at most {KEY_CHARACTERS_MAX} characters",
    "kv_priority": f"an integer from {KV_PRIORITY_MIN} (evicted first) to {KV_PRIORITY_MAX}",
    "priority": f"an integer from {PRIORITY_MIN} to {-PRIORITY_MIN}; lower is earlier",
    "nvext": 'an object such as {"agent_hints": {"priority": 5}}, in which higher is earlier',
    "stream": "true or false",
    "stream_options": 'an object such as {"include_usage": true}, and only with stream=true',
    "return_token_ids": "true or false",
    "add_special_tokens": "true or false",
    "add_generation_prompt": "true or false; it cannot be true with continue_final_message=true",
    "continue_final_message": "true or false",
    "return_token_strs": "true or false",
    "tokens": "a list of token ids of the vocabulary, at most as many as the context has",
    "response_format": 'an object with the type "text", "json_object" or "json_schema"; the type '
    '"json_schema" needs the field json_schema, such as {"name": "answer", "schema": {...}}, or '
    "schema",
    "structured_output": "a message with exactly one of its fields set",
    "guided_json": "a JSON schema, as an object or as a string",
    "guided_regex": "a non-empty string",
    "guided_choice": "a non-empty list of non-empty strings",
    "guided_grammar": "a non-empty string: a grammar in Lark's or GBNF's syntax",
    "regex": "a non-empty string",
    "ebnf": "a non-empty string: a grammar in GBNF's or Lark's syntax",
    "json_schema": "a JSON schema, as an object or as a string",
    "grammar": "a grammar in GBNF's or Lark's syntax; an empty string has no effect",
}


def refusal(name: str, given: object = None, *, why: str = "") -> BadRequest:
    """Returns the error for a field whose value is not allowed by `ALLOWED`.

    The message shows the value `given`, or `why`, a description of the value, if `given` is None.
    """
    return refusal_of(name, ALLOWED[name], given, why=why)


def name_prompt(error: BadRequest, index: int) -> BadRequest:
    """Returns the error with the prompt's index in the message, for a body with several prompts."""
    return type(error)(f"prompt {index} (from 0): {error.message}", param=error.param)


def rename(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """Returns the error with the API's name of the field instead of the internal name.

    `names` maps internal names to the API's names.
    """
    own = error.param
    if own is None or own not in names:
        return error
    # Replace the field's name only if a verb or value follows, as in "stop must be ...". Elsewhere
    # the same word may be ordinary English.
    message = re.sub(rf"\b{own}\b(?= (must|has|is|cannot|\d|'))", names[own], error.message)
    return type(error)(message, param=names[own])


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Applies `rename` to a BadRequest that the `with` block raises."""
    try:
        yield
    except BadRequest as error:
        raise rename(error, names) from None
