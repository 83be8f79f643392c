"""Applies the formats of a model to a request: template values, grammar and answer parser."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tandem.models.grammars.text import StructuredOutput
from tandem.router.parsers.machine import AnswerParser
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.allowed import REASONING_EFFORTS
from tandem.router.request.conversation import Conversation
from tandem.router.request.prompt.told_tools import (
    with_described_results,
    with_described_tools,
    with_written_calls,
)
from tandem.router.request.request import ClientRequest


def with_template_options(model_format: ModelFormat, request: ClientRequest) -> ClientRequest:
    """Returns the request with its chat adapted to the model's chat template.

    The returned chat has values for the template's variables. Tools, tool calls and results of
    calls that the template does not support are written as text. Raises BadRequest.
    """

    def filled(chat: Conversation) -> Conversation:
        if not model_format.takes_tools:
            chat = with_described_tools(chat, takes_system=model_format.takes_system)
        elif not model_format.shows_results(tools=bool(chat.tools)):
            chat = with_described_results(chat)
        chat = with_written_calls(chat, partial(model_format.written_calls, tools=bool(chat.tools)))
        options = model_format.template_options(
            chat.template_options, _known_effort(chat), chat.thinking
        )
        return replace(chat, template_options=options)

    if not isinstance(request.prompt, Conversation):
        return request
    pinned = request.pinned_chat and filled(request.pinned_chat)
    return replace(request, prompt=filled(request.prompt), pinned_chat=pinned)


def without_effect(model_format: ModelFormat, request: ClientRequest) -> list[str]:
    """Returns the names of the request's fields that have no effect, because the model's chat
    template does not read them. An entry of `chat_template_kwargs` has both names."""
    chat = request.prompt
    if not isinstance(chat, Conversation):
        return []
    effort = _known_effort(chat)
    names = model_format.without_effect(chat.template_options, effort, chat.thinking)
    is_unknown = effort is None and chat.reasoning_effort is not None
    return [*names, "reasoning_effort"] if is_unknown else names


def _known_effort(chat: Conversation) -> str | None:
    """Returns the reasoning effort; None for a value that no template knows."""
    effort = "xhigh" if chat.reasoning_effort == "max" else chat.reasoning_effort
    return effort if effort in REASONING_EFFORTS else None


def wanted_form(
    model_format: ModelFormat, request: ClientRequest, prompt_token_ids: Sequence[int]
) -> StructuredOutput | None:
    """Returns the constraint on the answer: the client's structured output, or forced tool calls.

    Returns None if the answer is not constrained.
    """
    chat = request.prompt
    form = request.structured_output
    if not isinstance(chat, Conversation):
        return form
    if chat.tool_choice != "required":
        if form is None or chat.continue_final_message:
            return form  # an answer that continues a message has no reasoning
        if not chat.callable_tools or form.field != "response_format":
            return model_format.after_reasoning(form, prompt_token_ids)
        return model_format.calls_or(
            form, chat.callable_tools, prompt_token_ids, one_call_only=chat.one_call_only
        )
    return model_format.forced_calls(
        chat.callable_tools, prompt_token_ids, one_call_only=chat.one_call_only
    )


def answer_parser(
    model_format: ModelFormat, request: ClientRequest, prompt_token_ids: Sequence[int]
) -> AnswerParser | None:
    """Returns the parser of the answer's reasoning and tool calls; None if it is not needed.

    Only the answer to a chat may need a parser.
    """
    chat = request.prompt
    if not isinstance(chat, Conversation):
        return None
    return model_format.answer_parser(
        chat.callable_tools,
        prompt_token_ids,
        one_call_only=chat.one_call_only,
        # As with OpenAI, the finish reason is "stop" if the answer must call one named function.
        finish_reason="stop" if chat.only_tool else "tool_calls",
        continued=chat.continued,
        known_names_only=chat.allowed_tools is not None,
    )
