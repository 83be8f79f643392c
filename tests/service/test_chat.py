"""`tandem chat` in a pseudo-terminal, beside a server whose answers are scripted."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.harness.cluster import wait_for

pytestmark = pytest.mark.service

DEADLINE_S = 30.0


class Server(ThreadingHTTPServer):
    """Answers with the events that the last message asks for, and keeps the bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()  # set when a client has closed the stream early
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "first-model"}, {"id": "second-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.path == "/v1/completions":
            self._stream([{"choices": [{"text": "continued", "finish_reason": "stop"}]}])
            return
        asked = body["messages"][-1]["content"]
        if asked == "refuse":
            self._reply(400, {"error": {"message": "the prompt is too long: 9 tokens"}})
        elif asked == "no template":
            self._reply(400, {"error": {"message": "this model has no chat template; use ..."}})
        elif asked == "break":
            failed = {"error": {"message": "the worker was lost"}}
            self._stream([_delta(content="half an "), failed])
        elif asked == "silence":
            self.server.left.wait(DEADLINE_S)
        elif asked == "endless":
            self._stream(_delta(content=f"word{n} ") for n in range(10_000))
        else:
            usage = {"choices": [], "usage": {"completion_tokens": 7}}
            thought = _delta(reasoning_content="let me think")
            self._stream([thought, _delta(content=f"you said \x1b[2J{asked}"), usage])

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Any) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left.set()


def _delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


class Screen:
    """`tandem chat` in a terminal of its own."""

    def __init__(self, *options: str, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.ops.cli", "chat", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode() + b"\n")

    def wait(self, text: str) -> str:
        """Waits until the terminal has shown `text`. Returns what it showed up to its end, and
        forgets that."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.text:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.text[-500:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert text in self.text, f"{text!r} is not in {self.text[-500:]!r}"
        shown, _, self.text = self.text.partition(text)
        return shown + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


@pytest.fixture
def screen(server: Server) -> Iterator[Screen]:
    screen = Screen("--url", server.url, "--temperature", "0")
    try:
        screen.wait("> ")
        yield screen
    finally:
        screen.close()


def test_a_conversation_has_its_history_and_dim_reasoning(server: Server, screen: Screen) -> None:
    screen.type("hello")
    shown = screen.wait("7 tokens in")
    assert "\x1b[2mlet me think" in shown
    assert "you said \\x1b[2Jhello" in shown, "a model must not control the terminal"
    screen.wait("> ")
    screen.type("/system be brief")
    screen.wait("instructions: be brief")
    screen.wait("> ")
    screen.type("again")
    screen.wait("7 tokens in")
    body = server.bodies[-1]
    assert (body["model"], body["temperature"]) == ("first-model", 0)
    assert [each["role"] for each in body["messages"]] == ["system", "user", "assistant", "user"]
    screen.type("/undo")
    screen.type("/retry")
    screen.wait("7 tokens in")
    assert [each["content"] for each in server.bodies[-1]["messages"]] == ["be brief", "hello"]
    screen.type("/model second-model")
    screen.wait("models: ")
    screen.type("/clear")
    screen.type("new")
    screen.wait("7 tokens in")
    assert server.bodies[-1]["model"] == "second-model"
    assert len(server.bodies[-1]["messages"]) == 2
    screen.type("/nonsense")
    screen.wait("there is no command /nonsense; /help lists them")
    screen.type("/quit")
    assert screen.process.wait(DEADLINE_S) == 0


def test_ctrl_c_stops_the_answer_only(server: Server, screen: Screen) -> None:
    screen.type("endless")
    screen.wait("word9 ")
    os.killpg(screen.process.pid, signal.SIGINT)
    screen.wait("stopped by Ctrl-C")
    assert server.left.wait(DEADLINE_S), "the server goes on"
    screen.wait("> ")
    screen.type("go on")
    screen.wait("7 tokens in")
    kept = server.bodies[-1]["messages"][1]["content"]
    assert kept.startswith("word0 word1 word2 ")


def test_a_message_without_an_answer_is_dropped(server: Server, screen: Screen) -> None:
    screen.type("silence")
    wait_for(lambda: server.bodies, deadline_s=DEADLINE_S, what="the request")
    os.killpg(screen.process.pid, signal.SIGINT)
    screen.wait("stopped by Ctrl-C")
    server.left.set()
    screen.wait("> ")
    screen.type("hello")
    screen.wait("7 tokens in")
    assert [each["content"] for each in server.bodies[-1]["messages"]] == ["hello"]


def test_errors_are_told_and_the_conversation_goes_on(server: Server, screen: Screen) -> None:
    screen.type("break")
    assert "half an " in screen.wait("the worker was lost")
    screen.wait("> ")
    screen.type("refuse")
    screen.wait("the prompt is too long: 9 tokens")
    screen.wait("> ")
    screen.type("hello")
    screen.wait("7 tokens in")
    sent = [each["content"] for each in server.bodies[-1]["messages"]]
    assert sent == ["break", "half an ", "hello"], "a message that was refused is not sent again"
    server.shutdown()
    server.server_close()
    screen.wait("> ")
    screen.type("anybody there?")
    screen.wait(f"no server answers at {server.url}")


def test_a_model_without_a_chat_template_continues_a_transcript(
    server: Server, screen: Screen
) -> None:
    screen.type("no template")
    screen.wait("continued")
    body = server.bodies[-1]
    assert body["prompt"] == "User: no template\nAssistant:"
    assert body["stop"] == ["\nUser:", "\nAssistant:"]


def test_a_pipe_asks_one_question_and_no_colour_is_asked_for(server: Server) -> None:
    command = [sys.executable, "-m", "tandem.ops.cli", "chat", "--url", f"{server.url}/v1"]
    done = subprocess.run(
        command, input="from a pipe", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "you said \\x1b[2Jfrom a pipe\n"
    screen = Screen("--url", server.url, NO_COLOR="1")
    try:
        screen.wait("> ")
        screen.type("hello")
        assert "\x1b[31m" not in screen.wait("7 tokens in")
    finally:
        screen.close()
