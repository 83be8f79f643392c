"""The allowed values of a request's fields and their bounds, as the error messages state them."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tandem.common.kv_budget import BUDGET_TOKENS_MAX, SINKS_DEFAULT
from tandem.common.retention import PRIORITY_MAX, PRIORITY_MIN
from tandem.errors import BadRequest

STOP_STRINGS_MAX = 4
STOP_CHARACTERS_MAX = 1024
STOP_TOKEN_IDS_MAX = 128
PENALTY_MAX = 2.0
REPETITION_PENALTY_MAX = 100.0
BIAS_MAX = 100.0
BIASES_MAX = 1024
BAD_WORDS_MAX = 128
BAD_WORD_CHARACTERS_MAX = 128
LOGPROBS_MAX = 20

CHOICES_MAX = 128  # sequences of one body; a worker's queue holds 256 by default
BEAMS_MAX = 16
KEY_CHARACTERS_MAX = 1024
LENGTH_PENALTY_MAX = 10.0
TOOLS_MAX = 1024

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

ALLOWED = {
    "model": "the name of the served model",
    "prompt": "a non-empty string, or one list of token ids",
    "messages": "a non-empty list of messages, each with a role (system, user, assistant, tool, "
    "or another that the chat template knows: up to 64 letters, digits, _ and -) "
    'and a content that is a string or a list of {"type": "text", "text": ...} parts',
    "tools": f'a list of at most {TOOLS_MAX} tools such as {{"type": "function", "function": '
    '{"name": ..., "parameters": ...}}',
    "tool_choice": 'auto, none, or with tools: required or one of them, such as {"type": '
    '"function", "function": {"name": ...}}',
    "function": "the name of one of the tools, and only with tool_choice=required",
    "parallel_tool_calls": "true or false",
    "reasoning_effort": f"one of {', '.join(REASONING_EFFORTS)}",
    "chat_template_kwargs": "an object with variables of the model's chat template",
    "temperature": "a number from 0 (greedy) to 2",
    "top_p": "a number over 0 and at most 1",
    "top_k": "an integer: -1 or 0 (off), or a count of tokens",
    "min_p": "a number from 0 (off) to 1",
    "seed": "an integer from -2^63 to 2^64-1",
    "presence_penalty": "a number from -2 to 2; 0 is off",
    "frequency_penalty": "a number from -2 to 2; 0 is off",
    "repetition_penalty": f"a number from {1 / REPETITION_PENALTY_MAX:g} to "
    f"{REPETITION_PENALTY_MAX:g}; 1 is off",
    "logit_bias": f"an object of at most {BIASES_MAX} token ids, each with a number from "
    f"{-BIAS_MAX:g} to {BIAS_MAX:g}",
    "min_tokens": "an integer from 0 to max_tokens",
    "bad_words": f"a list of at most {BAD_WORDS_MAX} non-empty strings of at most "
    f"{BAD_WORD_CHARACTERS_MAX} characters",
    "n": f"an integer from 1 to {CHOICES_MAX}, from 1 to {BEAMS_MAX} with use_beam_search, and at "
    f"most {CHOICES_MAX} times the number of prompts",
    "best_of": f"an integer from n to {CHOICES_MAX}, n with stream=true or use_beam_search, at "
    f"most {CHOICES_MAX} times the number of prompts, and not over n for a chat",
    "use_beam_search": "true or false, and not true with stream=true",
    "length_penalty": f"a number from {-LENGTH_PENALTY_MAX:g} to {LENGTH_PENALTY_MAX:g}, and 1 "
    "without use_beam_search",
    "kv_budget": 'an object such as {"policy": "sinks_window", "tokens": 1024, "sinks": 4}, with '
    f"the policy sinks_window or heavy_hitters, tokens from 1 to {BUDGET_TOKENS_MAX} and sinks "
    f"from 0 to tokens - 1 (by default {SINKS_DEFAULT})",
    "logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "prompt_logprobs": f"an integer from 0 to {LOGPROBS_MAX}",
    "echo": "true or false",
    "include_stop_str_in_output": "true or false",
    "skip_special_tokens": "true or false",
    "truncate_prompt_tokens": "an integer of at least 1, or -1 (what the context leaves)",
    "return_tokens_as_token_ids": "true or false",
    "max_tokens": "an integer of at least 1, or 0 with echo of a prompt",
    "max_completion_tokens": "an integer of at least 1",
    "stop": f"a non-empty string of at most {STOP_CHARACTERS_MAX} characters, or a list of at "
    f"most {STOP_STRINGS_MAX} such strings",
    "stop_token_ids": f"a list of at most {STOP_TOKEN_IDS_MAX} token ids of the vocabulary",
    "ignore_eos": "true or false",
    "prompt_cache_retention": "in_memory or 24h",
    "prompt_cache_key": f"a string of at most {KEY_CHARACTERS_MAX} characters",
    "kv_priority": f"an integer from {PRIORITY_MIN} (evicted first) to {PRIORITY_MAX}",
    "stream": "true or false",
    "stream_options": 'an object such as {"include_usage": true}, and only with stream=true',
    "return_token_ids": "true or false",
    "add_special_tokens": "true or false",
    "add_generation_prompt": "true or false, and not true with continue_final_message",
    "continue_final_message": "true or false",
    "return_token_strs": "true or false",
    "tokens": "a list of token ids of the vocabulary, at most as many as the context has",
    "response_format": 'an object with the type "text", "json_object" or "json_schema"; the last '
    'with json_schema, such as {"name": "answer", "schema": {...}}',
    "structured_output": "a message with one of its forms",
    "structured_outputs": "an object with exactly one of json (a JSON schema), json_object (true), "
    "regex, choice (a list of strings) and grammar",
    "guided_json": "a JSON schema, as an object or as a string",
    "guided_regex": "a non-empty string",
    "guided_choice": "a non-empty list of non-empty strings",
    "guided_grammar": "a non-empty string: a grammar in Lark's or GBNF's syntax",
    "regex": "a non-empty string",
    "ebnf": "a non-empty string: a grammar in GBNF's or Lark's syntax",
}


def refusal(name: str, given: object = None, *, why: str = "") -> BadRequest:
    """Returns the error for a field whose value `ALLOWED` excludes.

    Its message shows the given value, or `why`, a description of it.
    """
    shown = why if given is None else shorten(given)
    shown = f"; it is {shown}" if shown else ""
    return BadRequest(f"{name} must be {ALLOWED[name]}{shown}", param=name)


def name_prompt(error: BadRequest, index: int) -> BadRequest:
    """Returns the same error with the index of the prompt, for a body with several prompts."""
    return type(error)(f"prompt {index} (from 0): {error.message}", param=error.param)


def rename(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """Returns the same error with an API's own names of the fields."""
    own = error.param
    if own is None or own not in names:
        return error
    # Replace the name only where it is the subject; elsewhere it may be an ordinary word.
    message = re.sub(rf"\b{own}\b(?= (must|has|is|cannot|\d|'))", names[own], error.message)
    return type(error)(message, param=names[own])


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors an API's names for the fields of a chat."""
    try:
        yield
    except BadRequest as error:
        raise rename(error, names) from None


def shorten(value: object) -> str:
    """Formats a value for a message: at most 80 characters, quoted if it is the client's text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
