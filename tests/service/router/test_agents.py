"""The requests of agents, as `tests/conformance/run_clients.py` recorded them, with filler for
prose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.harness.models import HERMES_TEMPLATE, with_template
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually
from tests.service.router.test_http import EOS

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

DATA = Path(__file__).parents[2] / "data" / "agents"
MAX_MODEL_LEN = 131_072
ROUTER = {"responses_kept": 4}
REQUESTS = [
    pytest.param(request, id=f"{file.stem}-{index}")
    for file in sorted(DATA.glob("*.json"))
    for index, request in enumerate(json.loads(file.read_text()))
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with a long context and another chat template."""
    folder = with_template(tmp_path_factory.mktemp("model") / "tiny", HERMES_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def filled(value: Any) -> Any:
    """Returns a recorded JSON value with filler of as many tokens as its prose had."""
    if isinstance(value, dict):
        if value.keys() == {"filler"}:
            return " ".join(["word"] * value["filler"])
        return {name: filled(item) for name, item in value.items()}
    return [filled(item) for item in value] if isinstance(value, list) else value


def num_filler(value: Any) -> int:
    """Returns how many tokens of prose a recorded JSON value has, without those of schemas."""
    if isinstance(value, dict):
        if value.keys() == {"filler"}:
            return int(value["filler"])
        return sum(
            num_filler(value.get(name)) for name in ("text", "content", "messages", "system")
        )
    return sum(map(num_filler, value)) if isinstance(value, list) else 0


def tool_names(body: dict[str, Any]) -> list[str]:
    """Returns the names of the functions that a request offers."""
    names = []
    for tool in body.get("tools", []):
        for one in tool.get("tools", [tool]):
            names.append(one.get("function", one).get("name"))
    return [name for name in names if name]


async def _tell_idle(router: RunningRouter) -> None:
    """Every worker tells that it has done all that was submitted. Otherwise the next request of a
    session would wait until the long prompt of this one is computed."""
    for worker in router.workers:
        worker.load = msgspec.structs.replace(worker.load, step=worker.load.step + 1)
        worker.tell_load(1 << 40)
    steps = {worker.worker_id: worker.load.step for worker in router.workers}
    known = router.router.view.known
    await eventually(lambda: all(w.load.step == steps[w.record.worker_id] for w in known()))


@pytest.mark.parametrize("recorded", REQUESTS)
async def test_a_recorded_request_is_answered(
    router: RunningRouter, recorded: dict[str, Any]
) -> None:
    body = {**filled(recorded["body"]), "model": "tiny"}
    names = tool_names(body)
    text = "Done."
    if names:
        text = f'<tool_call>\n{{"name": "{names[0]}", "arguments": {{}}}}\n</tool_call>'
    router.script(saying([*router.tokenizer.encode(text), EOS], finish_reason="stop"))
    if references := [i for i in body.get("input", []) if i.get("type") == "item_reference"]:
        made = {"input": "x", "model": "tiny"}
        for reference in references:
            answer = await router.http.post("/v1/responses", json=made)
            reference["id"] = answer.json()["output"][0]["id"]
            for worker in router.workers:
                worker.submitted.clear()
    headers = filled(recorded["headers"])
    answer = await router.http.post(recorded["path"], json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    (submit,) = router.submitted
    await _tell_idle(router)
    prompt = submit.input.token_ids  # type: ignore[attr-defined]
    assert len(prompt) > num_filler(recorded["body"])
    if names:
        shown = router.tokenizer.decode(prompt, skip_special_tokens=False)
        assert all(f'"{name}"' in shown for name in names)
        assert f'"{names[0]}"' in answer.text.replace("\\", "")
    if body.get("stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "error" not in json.loads(events[-1])
        assert any(end in answer.text for end in ("message_stop", "response.completed", "[DONE]"))
