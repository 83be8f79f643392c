"""Applies the model's formats to a request: template values, constrained form and answer parser."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tandem.models.grammars.text import StructuredOutput
from tandem.router.parsers.machine import Machine
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.conversation import Conversation
from tandem.router.request.prompt.told_tools import with_described_tools, with_written_calls
from tandem.router.request.request import ClientRequest


def with_template_options(answers: ModelFormat, request: ClientRequest) -> ClientRequest:
    """Returns the request with the values for its chat template. Raises BadRequest."""

    def filled(chat: Conversation) -> Conversation:
        if not answers.takes_tools:
            chat = with_described_tools(chat, takes_system=answers.takes_system)
        chat = with_written_calls(chat, partial(answers.written_calls, tools=bool(chat.tools)))
        options, effort = chat.template_options, chat.reasoning_effort
        if chat.effort_is_hint and not answers.takes_effort:
            effort = None
        return replace(
            chat, template_options=answers.template_options(options, effort, chat.thinking)
        )

    if not isinstance(request.prompt, Conversation):
        return request
    pinned = request.pinned_chat and filled(request.pinned_chat)
    return replace(request, prompt=filled(request.prompt), pinned_chat=pinned)


def wanted_form(
    answers: ModelFormat, request: ClientRequest, prompt_token_ids: Sequence[int]
) -> StructuredOutput | None:
    """Returns the constraint on the answer: the client's, or that of the forced tool calls."""
    chat, form = request.prompt, request.structured_output
    if not isinstance(chat, Conversation):
        return form
    if chat.tool_choice != "required":
        if form is None or chat.continue_final_message:
            return form  # a continued message is past its reasoning
        return answers.after_reasoning(form, prompt_token_ids)
    return answers.forced_calls(
        chat.callable_tools, prompt_token_ids, one_call_only=chat.one_call_only
    )


def answer_parser(
    answers: ModelFormat, request: ClientRequest, prompt_token_ids: Sequence[int]
) -> Machine | None:
    """Returns the parser of the answer's reasoning and tool calls; None unless it is a chat."""
    chat = request.prompt
    if not isinstance(chat, Conversation):
        return None
    return answers.machine(
        chat.callable_tools,
        prompt_token_ids,
        one_call_only=chat.one_call_only,
        # the values that OpenAI uses
        finish_reason="stop" if chat.only_tool else "tool_calls",
        continued=chat.continued,
    )
