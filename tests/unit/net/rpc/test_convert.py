"""Structs and messages: nothing is lost between a router's request and an engine's spec."""

from __future__ import annotations

import pytest

from tandem.common.adapter import Adapter
from tandem.common.cached_tokens import CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.retention import NO_RETENTION, Retention
from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode, SequenceSpec
from tandem.net.rpc.convert import cached_of, retention_of, to_message, to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.convert import sequence_spec

# Values that a float of 32 bits holds.
SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    seed=2**64 - 1,
    max_tokens=9,
    min_tokens=3,
    stop_token_ids=[2, 5],
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    repetition_penalty=1.5,
    logit_bias={5: -1.5, 0: 2.0},
    logprobs=0,
    prompt_logprobs=4,
    is_resolved=True,
    bad_words_token_ids=[[7], [8, 9]],
)
SPEC = SequenceSpec("s", [1, 2, 3], 2, Mode.LOCAL, SAMPLING)
WHOLE = SequenceSpec(
    "s",
    [1, 2, 3],
    2,
    Mode.LOCAL,
    SAMPLING,
    cache_salt=b"salt",
    adapter=Adapter("a", "d", "/a", 8, 2.5),
    embed=True,
    grammar="g",
    retention=Retention(True, 9.0, 7, 3, 0),
    kv_budget=KvBudget(64, 0),
)


@pytest.mark.parametrize("spec", [SPEC, WHOLE])
def test_a_spec_arrives_as_it_was_sent(spec: SequenceSpec) -> None:
    sent = to_message(pb.SequenceInput, spec).SerializeToString()
    arrived = pb.SequenceInput.FromString(sent)
    assert sequence_spec(arrived, sequence_id="s", mode=Mode.LOCAL) == spec


def test_each_field_of_the_wire_is_a_sampling_parameter() -> None:
    """A name that only one side has would be lost without an error."""
    names = {field.name for field in pb.Sampling.DESCRIPTOR.fields} - {"bad_words"}
    assert names <= {*SamplingParams.__struct_fields__}
    assert all(getattr(SAMPLING, name) != getattr(SamplingParams(), name) for name in names)


# Sampling parameters on which the router acts alone, and those that another message has.
OF_ROUTER = {"n", "stop", "ignore_eos", "structured_outputs", "skip_special_tokens"}
OF_ROUTER |= {"bad_words", "include_stop_str_in_output", "truncate_prompt_tokens", "is_resolved"}
OF_SEQUENCE = {"max_tokens", "stop_token_ids", "prompt_logprobs"}


def test_each_sampling_parameter_is_on_the_wire() -> None:
    """Without it, a cluster would ignore a parameter on which `LLM` acts."""
    wire = {field.name for field in pb.Sampling.DESCRIPTOR.fields} | OF_ROUTER | OF_SEQUENCE
    assert {*SamplingParams.__struct_fields__} - wire == {"bad_words_token_ids"}


def test_zeros_of_an_older_router_are_neutral() -> None:
    spec = sequence_spec(
        pb.SequenceInput(token_ids=[1], num_prompt_tokens=1, max_tokens=4),
        sequence_id="s",
        mode=Mode.LOCAL,
    )
    assert spec.sampling.repetition_penalty == 1.0
    assert spec.sampling.logprobs is None
    assert spec.sampling.prompt_logprobs is None
    assert (spec.adapter, spec.kv_budget, spec.retention) == (None, None, NO_RETENTION)


def test_an_old_router_asks_for_no_priority() -> None:
    assert retention_of(pb.SequenceInput()) == NO_RETENTION
    asked = pb.Retention(returns=True, pin_s=9.0, weight=7)
    assert retention_of(pb.SequenceInput(retention=asked)) == Retention(True, 9.0, 7)
    for priority in (0, 100):
        sent = pb.Retention(weight=100, priority=priority)
        assert retention_of(pb.SequenceInput(retention=sent)) == Retention(priority=priority)


def test_a_worker_without_tiers_has_cached_tokens_in_its_pool() -> None:
    assert cached_of(pb.Prefilled(cached_tokens=5)) == CachedTokens(device=5)
    cached = CachedTokens(device=1, host=2, peer=4)
    told = pb.Prefilled(cached_tokens=7, cached_by_tier=to_message(pb.CachedTokens, cached))
    assert cached_of(told) == cached
    assert to_struct(CachedTokens, told.cached_by_tier, disk=3) == CachedTokens(
        device=1, host=2, disk=3, peer=4
    )
