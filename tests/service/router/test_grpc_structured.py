"""Forms of answers over gRPC: what the workers get, and refusals that name the field."""

from __future__ import annotations

import json

import grpc.aio
import pytest

from tandem.client import InferenceStub
from tandem.client import inference as pb
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
UNSUPPORTED = json.dumps({"type": "array", "uniqueItems": True})
FORMS = {
    "object": pb.StructuredOutput(json_object=pb.StructuredOutput.JsonObject()),
    "schema": pb.StructuredOutput(json_schema=SCHEMA),
    "lenient": pb.StructuredOutput(json_schema=UNSUPPORTED, lenient=True),
    "regex": pb.StructuredOutput(regex="[a-z]+"),
    "choice": pb.StructuredOutput(choice=pb.StructuredOutput.Choices(texts=["yes", "no"])),
    "grammar": pb.StructuredOutput(grammar='root ::= "yes" | "no"'),
}
REFUSED = {
    "no form": pb.StructuredOutput(),
    "no JSON": pb.StructuredOutput(json_schema="{"),
    "no schema": pb.StructuredOutput(json_schema="[]"),
    "keyword": pb.StructuredOutput(json_schema=UNSUPPORTED),
    "size": pb.StructuredOutput(json_schema=json.dumps({"const": "x" * (128 << 10)})),
    "regex": pb.StructuredOutput(regex="("),
    "no choice": pb.StructuredOutput(choice=pb.StructuredOutput.Choices()),
    "empty choice": pb.StructuredOutput(choice=pb.StructuredOutput.Choices(texts=[""])),
    "grammar": pb.StructuredOutput(grammar="root: x"),
}


async def generate(router: RunningRouter, form: pb.StructuredOutput) -> list[pb.GenerateResponse]:
    """Returns the router's answer of a form, after it forgot the requests before."""
    for worker in router.workers:
        worker.submitted.clear()
    router.script(saying([40, 2], finish_reason="stop"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        asked = pb.GenerateRequest(text="x", structured_output=form)
        return [part async for part in InferenceStub(channel).Generate(asked)]


@pytest.mark.parametrize("name", FORMS)
async def test_a_worker_gets_the_grammar(name: str, router: RunningRouter) -> None:
    answer = await generate(router, FORMS[name])
    assert answer[-1].finish_reason == "stop"
    (submit,) = router.submitted
    assert submit.input.grammar


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_names_the_field(name: str, router: RunningRouter) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="structured_output") as raised:
        await generate(router, REFUSED[name])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not router.submitted
