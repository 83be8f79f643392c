"""The command `tandem chat`: a conversation in the terminal with a model behind OpenAI's API.

The API keeps no conversation, so the program sends the whole conversation with each message. It
shows the answer while it arrives. A model without a chat template answers through the completions
API, with the conversation as a transcript.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from tandem.cluster.operate import api_key
from tandem.common.printable import printable
from tandem.errors import OperateError

API_KEY_VARIABLES = ("TANDEM_API_KEY", "OPENAI_API_KEY")
_CONNECT_S = 10.0
_HELP = """\
/help           this list
/system TEXT    set the instructions of the conversation; without a text, show them
/retry          drop the last answer and ask again
/undo           drop the last message and its answer
/clear          begin a new conversation
/model NAME     ask another model; without a name, list the models
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ continues on the next line."""


@dataclass(slots=True)
class Answer:
    """The part of an answer that has arrived so far."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    first_s: float = 0.0  # seconds until the first token; 0: there was none


@dataclass(slots=True)
class Chat:
    """A conversation with the model `model` of the server at `url`.

    `body` has fields that are sent with each request, such as `temperature`.
    """

    url: str
    console: Console
    model: str = ""
    system: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    _has_template: bool = True

    def ask(self, text: str) -> None:
        """Sends a message and shows the answer. Ctrl-C ends the answer. Raises OperateError.

        After Ctrl-C or an error, the message stays in the conversation with the part of the answer
        that has arrived. If nothing has arrived, the message is dropped.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        began = time.monotonic()
        try:
            self._show(answer, began)
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
            self.console.print()
        self._show_figures(answer, time.monotonic() - began)

    def models(self) -> list[str]:
        """Returns the names of the models that the server has. Raises OperateError."""
        try:
            reply = httpx.get(f"{self.url}/v1/models", headers=_headers(), timeout=_CONNECT_S)
            _check(reply)
            return [str(each["id"]) for each in reply.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise _unreachable(self.url, error) from error

    def _show(self, answer: Answer, began: float) -> None:
        is_reasoning = False
        for reasoning, text in self._deltas(answer, began):
            if reasoning and self.console.is_terminal:
                self.console.print(f"[dim]{escape(reasoning)}[/]", end="")
                is_reasoning = True
            if text:
                if is_reasoning:
                    self.console.print("\n")
                    is_reasoning = False
                answer.text += text
                self.console.print(text, end="", markup=False)

    def _show_figures(self, answer: Answer, took_s: float) -> None:
        parts = [f"{answer.num_tokens} tokens in {took_s:.1f} s"] if answer.num_tokens else []
        if answer.first_s:
            parts.append(f"the first after {answer.first_s:.2f} s")
        if answer.finish_reason == "stopped":
            parts.append("stopped by Ctrl-C")
        elif answer.finish_reason == "length":
            parts.append(
                "cut at the token limit; ask the model to continue, or ask again with /retry"
            )
        if parts and self.console.is_terminal:
            self.console.print(f"[dim]{', '.join(parts)}[/]")

    def _deltas(self, answer: Answer, began: float) -> Iterator[tuple[str, str]]:
        """Yields each piece of the answer as (reasoning, text). Stores the number of tokens, the
        time of the first token and the finish reason in `answer`."""
        for event in self._events():
            if error := event.get("error"):
                told = error.get("message") if isinstance(error, dict) else error
                raise OperateError(str(told))
            if usage := event.get("usage"):
                answer.num_tokens = int(usage.get("completion_tokens") or 0)
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {"content": choice.get("text")}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                text = delta.get("content") or ""
                if (reasoning or text) and not answer.first_s:
                    answer.first_s = time.monotonic() - began
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                yield _shown(reasoning), _shown(text)

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yields the parsed events of the answer's stream. Raises OperateError."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= self.body
        if self._has_template:
            try:
                yield from self._stream("chat/completions", body | {"messages": self._sent()})
                return
            except OperateError as error:
                if "chat template" not in error.message:
                    raise
                self._has_template = False
                self.console.print("[dim](no chat template: the model continues a transcript)[/]")
        stop = ["\nUser:", "\nAssistant:"]
        yield from self._stream("completions", body | {"prompt": self._transcript(), "stop": stop})

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/{path}", json=body, headers=_headers(), timeout=timeout
            ) as reply:
                if reply.is_error:
                    reply.read()
                _check(reply)
                for line in reply.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        yield json.loads(line[5:])
        except (httpx.HTTPError, ValueError) as error:
            raise _unreachable(self.url, error) from error

    def _sent(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def _transcript(self) -> str:
        turns = [f"{each['role'].capitalize()}: {each['content']}" for each in self._sent()]
        return "\n".join([*turns, "Assistant:"])


def run(chat: Chat, question: str = "") -> int:
    """Sends the user's messages until the user quits. Returns the exit status. Raises OperateError
    if the server has no model.

    If `question` is given, only this question is answered. If standard input is not a terminal, its
    text is the question.
    """
    known = chat.models()
    if not chat.model:
        if not known:
            raise OperateError(f"the server at {chat.url} serves no model")
        chat.model = known[0]
    if not question and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if question:
        chat.ask(question)
        return 0
    # A shell script starts background programs with SIGINT (Ctrl-C) ignored. This restores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history in `input`
    chat.console.print(
        f"[dim]{escape(chat.model)} at {escape(chat.url)}; /help lists the commands, Ctrl-D ends "
        "the chat[/]"
    )
    while True:
        try:
            text = _read()
        except EOFError:
            chat.console.print()
            return 0
        except KeyboardInterrupt:
            chat.console.print()
            continue
        try:
            if text.startswith("/"):
                if not _obey(chat, text):
                    return 0
            elif text:
                chat.ask(text)
        except OperateError as error:
            chat.console.print(f"[red]{escape(printable(error.message))}[/]")


def _read() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines).strip()


def _obey(chat: Chat, line: str) -> bool:
    """Runs a slash command. Returns False if the command ends the chat."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    commands: dict[str, Callable[[], None]] = {
        "/help": lambda: chat.console.print(_HELP, markup=False),
        "/system": lambda: _set_system(chat, rest),
        "/model": lambda: _set_model(chat, rest),
        "/clear": lambda: chat.messages.clear(),
        "/undo": lambda: None if _undo(chat) else _no_message(chat),
        "/retry": lambda: _retry(chat),
    }
    if word in ("/quit", "/exit"):
        return False
    if (command := commands.get(word)) is None:
        chat.console.print(f"[red]there is no command {escape(printable(word))}; /help lists them")
    else:
        command()
    return True


def _set_system(chat: Chat, text: str) -> None:
    if text:
        chat.system = text
    chat.console.print(f"[dim]instructions: {escape(chat.system) or 'none'}[/]")


def _set_model(chat: Chat, name: str) -> None:
    known = chat.models()
    if name in known:
        chat.model = name
    elif name:
        chat.console.print(f"[red]there is no model {escape(printable(name))}[/]")
    shown = ", ".join(f"[bold]{escape(n)}[/]" if n == chat.model else escape(n) for n in known)
    chat.console.print(f"models: {shown}")


def _undo(chat: Chat) -> str:
    """Drops the last question and its answer. Returns the question; "" if there is none."""
    question = ""
    while chat.messages and not question:
        last = chat.messages.pop()
        question = last["content"] if last["role"] == "user" else ""
    return question


def _retry(chat: Chat) -> None:
    if question := _undo(chat):
        chat.ask(question)
    else:
        _no_message(chat)


def _no_message(chat: Chat) -> None:
    chat.console.print("[red]the conversation has no message yet[/]")


def _headers() -> dict[str, str]:
    key = api_key() or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _check(reply: httpx.Response) -> None:
    """Raises OperateError with the server's own message if the reply is an error."""
    if not reply.is_error:
        return
    try:
        told = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        told = f"the server answers {reply.status_code} {reply.reason_phrase}"
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        told = f"{told} (set {' or '.join(API_KEY_VARIABLES)})"
    raise OperateError(told)


def _unreachable(url: str, error: Exception) -> OperateError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return OperateError(
            f"no server answers at {url}; start one with `tandem up`, or name another with --url"
        )
    if isinstance(error, httpx.HTTPError):
        return OperateError(f"the connection to {url} was lost: {error}")
    return OperateError(f"the server at {url} does not answer with OpenAI's API: {error}")


def _shown(text: str) -> str:
    """Returns a model's text without characters that control the terminal."""
    return printable(text, keep="\n\t")
