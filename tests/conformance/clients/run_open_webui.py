# /// script
# dependencies = ["open-webui", "torch==2.13.0"]
# ///
"""Open WebUI's server: a user signs up, the model is listed, and a chat streams with a call of a
built-in tool; a second turn; a third one after a restart of the server.

The requests to the server are those of its own page: the server keeps the chat, and continues it
after the page has left.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
import uuid
from typing import Any

from checks import run
from scripted import BEFORE, Workplace, call

place = Workplace("open_webui")
_PORT = "8080"  # of the network namespace
_URL = f"http://127.0.0.1:{_PORT}"
_START_S = 600
_ANSWER_S = 240
_ENV = {
    "OPENAI_API_BASE_URL": f"{place.proxy.url}/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "WEBUI_SECRET_KEY": "none",
    "DATA_DIR": str(place.home / "data"),
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it loads a model of its own
    "ANONYMIZED_TELEMETRY": "False",
}
_USER = {"name": "Ada", "email": "ada@example.org", "password": "Ada-1815-12-10"}
_headers = {"content-type": "application/json"}
_chat_id = ""
_last_id = ""  # the last message of the chat


def _call(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{_URL}{path}", data, _headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _start() -> subprocess.Popen[bytes]:
    with (place.home / "server.log").open("ab") as log:
        server = subprocess.Popen(
            ["open-webui", "serve", "--host", "127.0.0.1", "--port", _PORT],
            cwd=place.folder,
            env=place.environment(_ENV),
            stdout=log,
            stderr=log,
        )
    ends = time.monotonic() + _START_S
    while True:
        assert server.poll() is None, f"the server ended: {_end_of_log()}"
        with contextlib.suppress(OSError):
            _call("/health")
            return server
        assert time.monotonic() < ends, f"the server did not start: {_end_of_log()}"
        time.sleep(1)


def _end_of_log() -> str:
    return (place.home / "server.log").read_text()[-1500:]


def _sign(how: str) -> None:
    token = _call(f"/api/v1/auths/{how}", _USER)["token"]
    _headers["authorization"] = f"Bearer {token}"


def _ask(question: str) -> str:
    """Sends a turn as the page does. Returns the answer that the server has kept."""
    global _chat_id, _last_id
    message = {"id": str(uuid.uuid4()), "role": "user", "content": question}
    answer_id = str(uuid.uuid4())
    body = {
        "model": place.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": question}],
        "session_id": "page",
        "id": answer_id,
        "parent_id": _last_id or None,
        "user_message": {
            **message,
            "parentId": _last_id or None,
            "childrenIds": [],
            "models": [place.model],
            "timestamp": int(time.time()),
        },
        "background_tasks": {
            "title_generation": not _chat_id,
            "tags_generation": not _chat_id,
            "follow_up_generation": True,
        },
    }
    started = _call("/api/chat/completions", body | ({"chat_id": _chat_id} if _chat_id else {}))
    _chat_id, _last_id = started["chat_id"], answer_id
    ends = time.monotonic() + _ANSWER_S
    while True:
        kept = _call(f"/api/v1/chats/{_chat_id}")["chat"]["history"]["messages"][answer_id]
        if kept.get("done"):
            break
        assert time.monotonic() < ends, f"no answer: {kept} {_end_of_log()}"
        time.sleep(0.2)
    place.proxy.check()
    assert not kept.get("error"), kept
    return str(kept["content"])


def signs_up() -> None:
    _sign("signup")
    assert [model["id"] for model in _call("/api/models")["data"]] == [place.model]


def chats() -> None:
    place.proxy.script(call("get_current_timestamp"), BEFORE)
    assert _ask("What is the sea like now?").endswith(BEFORE)
    place.proxy.script("Because of the light.")
    assert _ask("Why?") == "Because of the light."


def resumes() -> None:
    server.terminate()
    server.wait(60)
    _start()  # ends with this process, as all processes of its namespace do
    del _headers["authorization"]
    _sign("signin")
    assert [chat["id"] for chat in _call("/api/v1/chats/")] == [_chat_id]
    place.proxy.script("It was grey.")
    assert _ask("What was it before?") == "It was grey."
    asked = [body for _, _, body in place.proxy.requests if body and body.get("tools")]
    assert "Because of the light." in str(asked[-1]["messages"])


server = _start()
run(signs_up, chats, resumes)
