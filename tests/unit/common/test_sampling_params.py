"""The bounds of sampling parameters are in tests/unit/router/test_request.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem import SamplingParams as PublicSamplingParams
from tandem.api.openai.requests import ChatBody, CompletionBody
from tandem.common import sampling_params
from tandem.common.sampling_params import ALLOWED, SamplingParams, StructuredOutputsParams
from tandem.engine.scheduler import check_spec
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2, worker_pb2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("n", 1.0),
        ("seed", "7"),
        ("ignore_eos", 1),
        ("stop", [5]),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", (5,)),
        ("bad_words", "word"),
        ("logit_bias", [5]),
        ("logit_bias", {5: "much"}),
        ("structured_outputs", {"regex": "a"}),
        ("structured_outputs", StructuredOutputsParams(regex=5)),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as raised:
        SamplingParams(**{name: value})
    assert raised.value.message == f"{name} is not valid; it must be {ALLOWED[name]}"
    assert raised.value.param == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"5": 1.0}}, "with a key that is not a token id"),
        ({"min_tokens": 17}, "min_tokens must be an integer from 0 to max_tokens; it is 17"),
        ({"structured_outputs": StructuredOutputsParams(regex="")}, "; it is empty"),
        ({"structured_outputs": StructuredOutputsParams(json_object=False)}, "exactly one of json"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a", choice=["b"])},
            "exactly one of json",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as raised:
        SamplingParams(**fields)
    assert message in raised.value.message


def test_what_an_engine_gets_has_no_bounds_of_a_client() -> None:
    asked = SamplingParams(temperature=1e-30, top_k=-1, logprobs=20)
    made = asked.resolved(seed=5, logprobs=32, stop_token_ids=[*range(200)])
    assert (made.temperature, made.top_k, made.logprobs, made.seed) == (0.01, 0, 32, 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


def test_the_python_api_has_this_type() -> None:
    assert PublicSamplingParams is SamplingParams


def test_each_api_has_each_parameter_on_which_the_engine_acts() -> None:
    """A body drops a field that it does not know, and names it in the header `warning` only."""
    names = {field.name for field in worker_pb2.Sampling.DESCRIPTOR.fields}
    for body in (ChatBody, CompletionBody):
        assert names <= body.model_fields.keys(), body
    found = {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names - found == {"logprobs"}, "which is a field of GenerateRequest itself"


def test_each_number_has_bounds_for_clients_and_for_the_engine() -> None:
    numbers = {f.name for f in msgspec.structs.fields(SamplingParams) if f.type is float}
    assert numbers <= sampling_params._NUMBERS.keys()
    assert numbers == check_spec._RANGES.keys()
