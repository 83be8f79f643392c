"""What programs need beside `checks.py`: a recording proxy before Tandem, which gives the model its
answers.

The programs run in a network namespace that has only its loopback device, and reach Tandem through
a Unix socket. The model has random weights. So the proxy adds `structured_outputs.choice` to
requests: the model then writes the next text of the script, because no other token is allowed.
Requests without tools, such as those for the title of a conversation, get a short text.

It needs only the standard library.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from checks import MODEL

SOCKET = os.environ.get("TANDEM_SOCKET", "")
# a folder for the recorded requests; "": none
RECORDS = os.environ.get("TANDEM_RECORDS", "")
NAME = "notes.txt"  # file on which the programs work
BEFORE, AFTER = "The sea is green.", "The sea is blue."
_ANSWERED = ("/chat/completions", "/responses", "/messages", "/completions")
_DEADLINE_S = 280


def call(name: str, **arguments: Any) -> str:
    """Returns the text of a tool call in the format of the model."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


class _Upstream(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(SOCKET)


class Proxy:
    """Forwards requests to Tandem. `errors` has the answers that are errors. With
    `answers_without_tools` the script is also for requests without tools."""

    def __init__(self, program: str, *, answers_without_tools: bool) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, body
        self.errors: list[str] = []
        self._script: deque[str] = deque()
        self._program = program
        self._answers_all = answers_without_tools
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.forward(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def script(self, *texts: str) -> None:
        """Sets the next answers to requests with tools."""
        assert not self._script, f"answers that no request got: {list(self._script)}"
        self._script.extend(texts)

    def check(self) -> None:
        """Raises AssertionError if an answer was an error, or if a text of the script is left."""
        assert not self.errors, self.errors[:3]
        assert not self._script, f"answers that no request got: {list(self._script)}"

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        """Forwards one request with the next text of the script, and its answer."""
        sent = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        if handler.headers.get("content-encoding") == "gzip":
            sent = gzip.decompress(sent)
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in _OF_HOP}
        body = json.loads(sent) if sent else None
        is_scripted = False
        if body is not None:
            self._record(handler.path, headers, body)
            body["model"] = MODEL  # as with --model-aliases
            if handler.path.partition("?")[0].endswith(_ANSWERED) and not _has_format(body):
                is_scripted = self._answers_all or bool(body.get("tools"))
                body["structured_outputs"] = {"choice": [self._next(is_scripted=is_scripted)]}
        upstream = _Upstream("tandem", timeout=_DEADLINE_S)
        upstream.request(
            handler.command,
            handler.path,
            None if body is None else json.dumps(body).encode(),
            {**headers, "host": "127.0.0.1"},
        )
        answer = upstream.getresponse()
        if answer.status in _BUSY and is_scripted:  # the program tries again
            self._script.appendleft(body["structured_outputs"]["choice"][0])
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_HOP:
                handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        told = b""
        try:
            while part := answer.read1(1 << 16):
                told = (told + part)[:1000] if answer.status >= 400 else b""
                handler.wfile.write(part)
                handler.wfile.flush()
        except OSError:  # the program left
            pass
        upstream.close()
        if answer.status >= 400 and answer.status not in _BUSY:
            self.errors.append(f"{handler.command} {handler.path}: {answer.status} {told!r}")

    def _record(self, path: str, headers: Mapping[str, str], body: Any) -> None:
        with self._lock:
            self.requests.append((path, dict(headers), body))
            if RECORDS:
                with (Path(RECORDS) / f"{self._program}.jsonl").open("a") as records:
                    print(json.dumps([path, dict(headers), body]), file=records)

    def _next(self, *, is_scripted: bool) -> str:
        if not is_scripted:
            return "ok"
        with self._lock:
            return self._script.popleft() if self._script else "Done."


def _has_format(body: Mapping[str, Any]) -> bool:
    """Returns whether the request itself gives the answer a form, such as a JSON schema."""
    formats = [body.get("response_format")]
    formats += [(body.get(field) or {}).get("format") for field in ("text", "output_config")]
    return any(form and form.get("type") != "text" for form in formats)


_BUSY = (429, 503, 529)
_OF_HOP = frozenset(
    (
        "connection",
        "content-length",
        "content-encoding",
        "host",
        "transfer-encoding",
        "accept-encoding",
        "keep-alive",
    )
)


class Workplace:
    """A home and a folder with one file for a program, and a proxy."""

    def __init__(self, program: str, *, answers_without_tools: bool = False) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"tandem-{program}-"))
        self.folder = self.home / "work"
        self.folder.mkdir()
        self.file = self.folder / NAME
        self.file.write_text(BEFORE + "\n")
        self.proxy = Proxy(program, answers_without_tools=answers_without_tools)
        self.model = MODEL
        subprocess.run(["git", "init", "-q", str(self.folder)], check=True)

    def run(self, *command: str, more: Mapping[str, str] = {}, stdin: str = "") -> str:
        """Runs the program in the folder. Returns its output. Raises AssertionError if it fails."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(more),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        told = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert done.returncode == 0, f"ended with {done.returncode}: {told} {self.proxy.errors[:3]}"
        self.proxy.check()
        return done.stdout

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "XDG_DATA_HOME": str(self.home / ".data"),
            "TERM": "dumb",
            "CI": "1",
            "NO_COLOR": "1",
            "DO_NOT_TRACK": "1",
            "LANG": "C.UTF-8",
            **more,
        }

    def check_edited(self) -> None:
        assert re.fullmatch(AFTER + r"\s*", self.file.read_text()), self.file.read_text()
